#include "support/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "support/permission.h"
#include "support/units.h"

namespace headway::test {
namespace {

constexpr Real infinity = std::numeric_limits<Real>::infinity();

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// Arithmetic in Number, with what a matrix stores rounded by store(). The exact one adds up dot products in eight sums,
// which is faster; the eager one in one chain.
template <class Wide>
struct Exact {
  using Number = Wide;
  static constexpr std::int64_t chains = 8;
  Number store(Number value) const { return value; }
};

template <class Sum>
struct Eager {
  using Number = Sum;
  static constexpr std::int64_t chains = 1;
  DType dtype;
  Number store(Number value) const { return static_cast<Number>(rounded(dtype, static_cast<double>(value))); }
};

// Below it numbers lose bits: of the type that an engine computes in.
Real smallest_normal(DType type) { return type == DType::f64 ? 0x1p-1022L : 0x1p-126L; }

// A size whose bound, 64 units and twice the half type's own, is half a quantum of the stored type.
Real size_of_half_a_quantum(DType type) {
  return quantum_of(type) / 2 / std::max(64 * unit_of(type), 2 * half_unit_of(type));
}

template <class Number>
std::vector<Number> numbers(const Array& array) {
  return std::vector<Number>(array.values.begin(), array.values.end());
}

template <class Number>
struct Dot {
  Number value = 0, size = 0;  // the sum of the products, and of their absolute values
};

template <class Arithmetic, class Number = typename Arithmetic::Number>
Dot<Number> dot(Arithmetic, const Number* a, const Number* b, std::int64_t width) {
  constexpr std::int64_t chains = Arithmetic::chains;
  Number values[chains] = {}, sizes[chains] = {};
  const auto add = [&](std::int64_t chain, std::int64_t d) {
    const Number product = a[d] * b[d];
    values[chain] += product;
    sizes[chain] += std::abs(product);
  };
  std::int64_t d = 0;
  for (; d + chains <= width; d += chains)
    for (std::int64_t chain = 0; chain < chains; ++chain) add(chain, d + chain);
  for (std::int64_t chain = 0; d < width; ++chain, ++d) add(chain, d);
  Dot<Number> result;
  for (std::int64_t chain = 0; chain < chains; ++chain) {
    result.value += values[chain];
    result.size += sizes[chain];
  }
  return result;
}

// Sums with the scales of Bounded, in the arithmetic's own numbers.
template <class Number>
struct Sums {
  explicit Sums(const Dims& of)
      : sizes(of), value(at(Array(of).elements())), terms(value), weighted(value), limit(value) {}

  Bounded bounded() const {
    Bounded result{Array(sizes), Array(sizes), Array(sizes), Array(sizes)};
    result.value.values.assign(value.begin(), value.end());
    result.terms.values.assign(terms.begin(), terms.end());
    result.weighted.values.assign(weighted.begin(), weighted.end());
    result.limit.values.assign(limit.begin(), limit.end());
    return result;
  }

  // One more term of an element, of a row with this L, whose value is limited by `most`.
  void add(std::size_t index, Number term, Number size, Number magnitude, Number most) {
    value[index] += term;
    terms[index] += size;
    weighted[index] += magnitude * size;
    limit[index] += most;
  }

  // The same for a vector of elements: factor * x[d], which counts as at least `least`.
  void add_vector(std::int64_t index, const Number* x, std::int64_t width, Number factor, Number size, Number magnitude,
                  Number most, Number least = 0) {
    Number *const to = value.data() + index, *const sizes_to = terms.data() + index;
    Number *const weighted_to = weighted.data() + index, *const limits_to = limit.data() + index;
    for (std::int64_t d = 0; d < width; ++d) {
      const Number x_size = std::abs(x[d]);
      to[d] += factor * x[d];
      sizes_to[d] += size * x_size + least;
      weighted_to[d] += magnitude * (size * x_size + least);
      limits_to[d] += most * x_size;
    }
  }

  Dims sizes;
  std::vector<Number> value, terms, weighted, limit;
};

template <class Number>
struct Score {
  Number scaled = 0, capped = 0, biased = 0;
  Number products = 0;   // |scale| sum |q k|
  Number magnitude = 0;  // L's: that + |bias| + |alibi|
};

constexpr Real largest_growth = 100;  // as an exponent

// L with what becomes of it in a weight. A score that is off by x makes its weight wrong by a factor of exp(x): the
// bounds' multiples of L say that while L is small beside 1/unit; beyond, rounding the score alone moves the weight by
// more.
Real grown(Real magnitude, DType type) {
  const Real unit = unit_of(type);
  return std::expm1(std::min<Real>(8 * unit * magnitude, largest_growth)) / (8 * unit);
}
// Whether rounding the scores may make any weight of any other.
bool weights_are_lost(Real magnitude, DType type) { return 8 * unit_of(type) * magnitude > largest_growth; }

// One row of the matrix.
template <class Number>
struct Row {
  std::vector<std::int64_t> keys;  // the allowed ones
  std::vector<Number> p, keep;     // of each allowed key
  std::vector<Number> p_size;      // what p's relative error counts from: at least the smallest normal number
  Number least_size = 0;           // of a weight that is stored
  std::vector<Number> tanh;        // of each allowed key, 0 without softcap
  std::vector<Number> slope_size;  // what the error of softcap's slope counts as, beside 1
  Number lse = -std::numeric_limits<Number>::infinity();
  Number sink = 0;       // the sink's share of the row
  Number magnitude = 0;  // L(i)
  Number grown = 0;      // and what the errors of its weights grow with
};

// A call's tensors as the arithmetic's numbers, and what is computed from them.
template <class Arithmetic>
class Work {
 public:
  using Number = typename Arithmetic::Number;

  Work(const Spec& spec, Arithmetic arithmetic)
      : spec_(spec),
        arithmetic_(arithmetic),
        q_(numbers<Number>(spec.q)),
        k_(numbers<Number>(spec.k)),
        v_(numbers<Number>(spec.v)),
        scale_(static_cast<Number>(spec.scale)),
        tiny_(static_cast<Number>(smallest_normal(spec.type))),
        lost_(static_cast<Number>(smallest_normal(spec.type) / 64)),
        lost_of_out_(static_cast<Number>(size_of_half_a_quantum(spec.type))) {}

  Forward forward() const;
  Backward backward(const Array& grad_out) const;
  std::pair<Forward, Backward> both(const Array& grad_out, ScoreMatrices* scores) const;
  ScoreMatrices scores() const;

 private:
  Score<Number> score(const RowPermission& permission, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t j) const;
  Row<Number> row(std::int64_t b, std::int64_t h, std::int64_t i, ScoreMatrices* scores = nullptr) const;
  // A score that is off by 4 units of its products moves the slope of a cap by at most so much; a bound has 64 units.
  Number slope_size(Number products) const {
    const Real unit = unit_of(spec_.type);
    return static_cast<Number>(std::min<Real>(4 * unit * products / static_cast<Real>(*spec_.softcap), 1) /
                               (64 * unit));
  }
  void finish_row(std::int64_t h, const std::vector<Number>& s, Row<Number>& row) const;
  struct Results;
  void add_row(const Row<Number>& one, std::int64_t b, std::int64_t h, std::int64_t i, Results& to) const;
  struct Gradients;
  void add_row_gradients(const Row<Number>& one, std::int64_t b, std::int64_t h, std::int64_t i, Gradients& to) const;

  std::int64_t kv_head(std::int64_t h) const { return h / (spec_.heads() / spec_.kv_heads()); }
  std::int64_t q_at(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return ((b * spec_.heads() + h) * spec_.q.size(2) + i) * spec_.head_dim();
  }
  std::int64_t k_at(std::int64_t b, std::int64_t g, std::int64_t j) const {
    return ((b * spec_.kv_heads() + g) * spec_.k.size(2) + j) * spec_.head_dim();
  }
  std::int64_t v_at(std::int64_t b, std::int64_t g, std::int64_t j) const {
    return ((b * spec_.kv_heads() + g) * spec_.v.size(2) + j) * spec_.value_dim();
  }

  const Spec& spec_;
  Arithmetic arithmetic_;
  std::vector<Number> q_, k_, v_;
  Number scale_, tiny_;
  Number lost_;         // the size of a product below the normal numbers, which rounds by up to half a quantum
  Number lost_of_out_;  // the same for an output that was saved
};

// The score of one pair after each stage.
template <class Arithmetic>
auto Work<Arithmetic>::score(const RowPermission& permission, std::int64_t b, std::int64_t h, std::int64_t i,
                             std::int64_t j) const -> Score<Number> {
  const Dot<Number> product =
      dot(arithmetic_, q_.data() + q_at(b, h, i), k_.data() + k_at(b, kv_head(h), j), spec_.head_dim());
  Score<Number> result;
  result.scaled = result.capped = arithmetic_.store(scale_ * product.value);
  result.products = result.magnitude = std::abs(scale_) * product.size;
  if (spec_.softcap) {
    const auto cap = static_cast<Number>(*spec_.softcap);
    if (std::isfinite(cap)) result.capped = arithmetic_.store(cap * std::tanh(result.scaled / cap));
  }
  const auto bias = static_cast<Number>(permission.bias(j));
  Number alibi = 0;
  if (spec_.alibi_slopes)
    alibi = static_cast<Number>(-(*spec_.alibi_slopes)(h) * static_cast<Real>(std::abs(i + offset(spec_, b) - j)));
  result.biased = arithmetic_.store(result.capped + bias + alibi);
  result.magnitude += std::abs(bias) + std::abs(alibi);
  return result;
}

// Forbidden pairs are read only where their scores are asked for.
template <class Arithmetic>
auto Work<Arithmetic>::row(std::int64_t b, std::int64_t h, std::int64_t i, ScoreMatrices* scores) const -> Row<Number> {
  Row<Number> row;
  const RowPermission permission(spec_, b, h, i);
  std::vector<Number> s;
  std::size_t number = at(((b * spec_.heads() + h) * spec_.q.size(2) + i) * spec_.k.size(2));
  for (std::int64_t j = 0; j < spec_.keys[at(b)]; ++j, ++number) {
    const bool is_allowed = permission.allows(j);
    if (!is_allowed && scores == nullptr) continue;
    const Score<Number> one = score(permission, b, h, i, j);
    if (scores != nullptr) {
      scores->scaled.values[number] = one.scaled;
      scores->capped.values[number] = one.capped;
      scores->biased.values[number] = is_allowed ? static_cast<Real>(one.biased) : -infinity;
      scores->products.values[number] = one.products;
      scores->magnitudes.values[number] = one.magnitude;
    }
    if (!is_allowed) continue;
    row.keys.push_back(j);
    row.keep.push_back(static_cast<Number>(kept(spec_, b, h, i, j)));
    row.tanh.push_back(spec_.softcap ? one.capped / static_cast<Number>(*spec_.softcap) : 0);
    row.slope_size.push_back(spec_.softcap ? slope_size(one.products) : 0);
    row.magnitude = std::max(row.magnitude, one.magnitude);
    s.push_back(one.biased);
  }
  if (!permission.is_padding()) finish_row(h, s, row);
  return row;
}

// The softmax of the scores of a row's allowed keys.
template <class Arithmetic>
void Work<Arithmetic>::finish_row(std::int64_t h, const std::vector<Number>& s, Row<Number>& row) const {
  // exp(-inf) is 0: the row is one without a sink.
  const bool sink = spec_.sinks && (*spec_.sinks)(h) != -infinity;
  if (row.keys.empty() && !sink) return;
  const bool weights_vanish = sink && (*spec_.sinks)(h) == infinity &&
                              std::all_of(s.begin(), s.end(), [](Number one) { return one < infinity; });
  if (weights_vanish) {  // p = exp(s - inf)
    row.lse = std::numeric_limits<Number>::infinity();
    row.sink = 1;
    row.p.assign(row.keys.size(), 0);
    row.p_size.assign(row.keys.size(), 0);
    return;
  }
  const Number sink_score = sink ? static_cast<Number>((*spec_.sinks)(h)) : 0;
  Number largest = sink ? sink_score : -std::numeric_limits<Number>::infinity();
  for (Number one : s) largest = std::max(largest, one);
  row.grown = static_cast<Number>(grown(row.magnitude + std::abs(sink_score), spec_.type));  // a sink is a score too
  if (weights_are_lost(row.magnitude + std::abs(sink_score), spec_.type)) row.least_size = 1;
  Number sum = sink ? std::exp(sink_score - largest) : 0;
  for (Number one : s) sum += row.p.emplace_back(std::exp(one - largest));
  row.lse = largest + std::log(sum);
  if (sink) row.sink = std::exp(sink_score - largest) / sum;
  for (Number& one : row.p) {
    one = arithmetic_.store(one / sum);
    row.p_size.push_back(one + std::max(tiny_, row.least_size));
  }
}

template <class Visit>
void each_row(const Spec& spec, Visit visit) {
  for (std::int64_t b = 0; b < spec.batch(); ++b)
    for (std::int64_t h = 0; h < spec.heads(); ++h)
      for (std::int64_t i = 0; i < spec.rows[at(b)]; ++i) visit(b, h, i);
}

// What the forward of rows adds up to.
template <class Arithmetic>
struct Work<Arithmetic>::Results {
  explicit Results(const Spec& spec)
      : out({spec.batch(), spec.heads(), spec.q.size(2), spec.value_dim()}),
        weights({spec.batch(), spec.heads(), spec.q.size(2), spec.k.size(2)}),
        lse({spec.batch(), spec.heads(), spec.q.size(2)}) {
    std::fill(lse.value.begin(), lse.value.end(), -std::numeric_limits<Number>::infinity());
  }
  Forward forward() const { return {out.bounded(), weights.bounded(), lse.bounded(), largest_score}; }

  Sums<Number> out, weights, lse;
  Number largest_score = 0;
};

template <class Arithmetic>
void Work<Arithmetic>::add_row(const Row<Number>& one, std::int64_t b, std::int64_t h, std::int64_t i,
                               Results& to) const {
  const std::int64_t number = (b * spec_.heads() + h) * spec_.q.size(2) + i, width = spec_.value_dim();
  for (std::size_t n = 0; n < one.keys.size(); ++n) {
    const std::int64_t j = one.keys[n];
    to.weights.add(at(number * spec_.k.size(2) + j), one.p[n], one.p[n] + one.least_size, one.grown, 1);
    if (one.keep[n] == 0) continue;
    const Number* v = v_.data() + v_at(b, kv_head(h), j);
    to.out.add_vector(number * width, v, width, one.p[n] * one.keep[n], one.p_size[n] * one.keep[n], one.grown, 0,
                      lost_ * one.keep[n]);
    for (std::int64_t d = 0; d < width; ++d) {
      Number& limit = to.out.limit[at(number * width + d)];
      limit = std::max(limit, one.keep[n] * std::abs(v[d]));
    }
  }
  to.lse.value[at(number)] = one.lse;
  to.lse.terms[at(number)] = std::isinf(one.lse) ? 0 : std::abs(one.lse);
  to.lse.weighted[at(number)] = std::isinf(one.lse) ? 0 : one.magnitude;
  to.lse.limit[at(number)] = std::numeric_limits<Number>::max();
  if (std::isfinite(one.magnitude)) to.largest_score = std::max(to.largest_score, one.magnitude);
}

// What the gradients of rows add up to.
template <class Arithmetic>
struct Work<Arithmetic>::Gradients {
  Gradients(const Spec& spec, const Array& grad)
      : grad_out(numbers<Number>(grad)), dq(spec.q.sizes()), dk(spec.k.sizes()), dv(spec.v.sizes()) {
    if (spec.bias) dbias.emplace(spec.bias->sizes());
    if (spec.sinks) dsinks.emplace(spec.sinks->sizes());
  }
  Backward backward(Arithmetic arithmetic) const;

  void reach(Number size) {
    if (std::isfinite(size)) largest = std::max(largest, size);
  }

  std::vector<Number> grad_out;
  Sums<Number> dq, dk, dv;
  std::optional<Sums<Number>> dbias, dsinks;
  Number largest = 0;  // of what is finite
};

// The gradients of one row, added to what the rows before it gave.
template <class Arithmetic>
void Work<Arithmetic>::add_row_gradients(const Row<Number>& one, std::int64_t b, std::int64_t h, std::int64_t i,
                                         Gradients& to) const {
  if (one.keys.empty()) return;
  const Number* grad_row = to.grad_out.data() + ((b * spec_.heads() + h) * spec_.q.size(2) + i) * spec_.value_dim();
  const std::int64_t g = kv_head(h), width = spec_.head_dim(), value_width = spec_.value_dim();
  const std::int64_t q_row = q_at(b, h, i);
  std::vector<Number> dp(one.keys.size());       // dP = keep * <dO, v>
  std::vector<Number> dp_size(one.keys.size());  // keep * sum |dO v|
  Number delta = 0;                              // sum_j p dP
  Number delta_size = 0, largest_dp = 0;
  Number lost_of_row = lost_of_out_;  // what each element of the saved output lost: its products below 2^-126, its own
  for (std::size_t n = 0; n < one.keys.size(); ++n) {
    const Dot<Number> product = dot(arithmetic_, grad_row, v_.data() + v_at(b, g, one.keys[n]), value_width);
    to.reach(product.size);  // an engine multiplies before it drops
    if (one.keep[n] == 0) continue;
    dp[n] = arithmetic_.store(one.keep[n] * product.value);
    dp_size[n] = one.keep[n] * product.size + tiny_;
    delta += one.p[n] * dp[n];
    delta_size += one.p_size[n] * dp_size[n];
    largest_dp = std::max(largest_dp, dp_size[n]);
    lost_of_row += lost_ * one.keep[n];
  }
  // delta may come from a saved output: <dO, out>.
  for (std::int64_t d = 0; d < value_width; ++d) delta_size += lost_ + lost_of_row * std::abs(grad_row[d]);
  const Number scale_size = std::abs(scale_);
  // What a score lost below the normal numbers counts for the slope of a cap that is itself no larger.
  const Number lost_slope =
      spec_.softcap ? lost_ * static_cast<Number>(width) / static_cast<Number>(*spec_.softcap) : Number{0};
  for (std::size_t n = 0; n < one.keys.size(); ++n) {
    const std::int64_t j = one.keys[n];
    const Number ds = arithmetic_.store(one.p[n] * (dp[n] - delta));
    const Number ds_size = one.p_size[n] * (dp_size[n] + delta_size) + tiny_;
    if (to.dbias) {
      const auto index = &spec_.bias->repeated(b, h, i, j) - spec_.bias->values.data();
      to.dbias->add(at(index), ds, ds_size, one.grown, 2 * largest_dp);
    }
    const Number before_cap = arithmetic_.store(ds * (1 - one.tanh[n] * one.tanh[n]));
    const Number size = ds_size * (1 + one.tanh[n] * one.tanh[n] + one.slope_size[n] + lost_slope) * scale_size,
                 most = 2 * largest_dp * scale_size;
    const Number least = tiny_ * scale_size;  // a product of dS may lose bits before the scale multiplies it
    const Number *const q = q_.data() + q_row, *const k = k_.data() + k_at(b, g, j);
    to.dq.add_vector(q_row, k, width, before_cap * scale_, size, one.grown, most, least);
    to.dk.add_vector(k_at(b, g, j), q, width, before_cap * scale_, size, one.grown, most, least);
    for (std::int64_t d = 0; d < width; ++d)
      to.reach(ds_size * std::max<Number>(1, scale_size) * std::max(std::abs(q[d]), std::abs(k[d])));
    if (one.keep[n] == 0) continue;
    const Number dropped = arithmetic_.store(one.p[n] * one.keep[n]);
    to.dv.add_vector(v_at(b, g, j), grad_row, value_width, dropped, one.p_size[n] * one.keep[n], one.grown, one.keep[n],
                     lost_ * one.keep[n]);
  }
  to.reach(2 * largest_dp);
  if (!to.dsinks) return;
  // The sink's weight and its product may lie below the normal numbers, where each rounds by up to half a quantum.
  const Number lost_of_sink = (*spec_.sinks)(h) == -infinity ? Number{0} : lost_ * (delta_size + 1);
  to.dsinks->add(at(h), -one.sink * delta, one.sink * delta_size + lost_of_sink, one.grown, largest_dp);
}

template <class Arithmetic>
Backward Work<Arithmetic>::Gradients::backward(Arithmetic arithmetic) const {
  Backward result{dq.bounded(), dk.bounded(), dv.bounded(), {}, {}, largest};
  if (dbias) result.dbias = dbias->bounded();
  if (dsinks) result.dsinks = dsinks->bounded();
  for (Bounded* one : {&result.dq, &result.dk, &result.dv}) {
    for (Real& value : one->value.values) value = arithmetic.store(static_cast<Number>(value));
    for (Real terms : one->terms.values)
      if (std::isfinite(terms)) result.largest = std::max(result.largest, terms);
  }
  return result;
}

template <class Arithmetic>
Forward Work<Arithmetic>::forward() const {
  Results results(spec_);
  each_row(spec_, [&](std::int64_t b, std::int64_t h, std::int64_t i) { add_row(row(b, h, i), b, h, i, results); });
  return results.forward();
}

template <class Arithmetic>
Backward Work<Arithmetic>::backward(const Array& grad_out) const {
  Gradients gradients(spec_, grad_out);
  each_row(spec_, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    add_row_gradients(row(b, h, i), b, h, i, gradients);
  });
  return gradients.backward(arithmetic_);
}

template <class Arithmetic>
std::pair<Forward, Backward> Work<Arithmetic>::both(const Array& grad_out, ScoreMatrices* scores) const {
  Results results(spec_);
  Gradients gradients(spec_, grad_out);
  if (scores != nullptr) *scores = ScoreMatrices(spec_);
  each_row(spec_, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const Row<Number> one = row(b, h, i, scores);
    add_row(one, b, h, i, results);
    add_row_gradients(one, b, h, i, gradients);
  });
  return {results.forward(), gradients.backward(arithmetic_)};
}

template <class Arithmetic>
ScoreMatrices Work<Arithmetic>::scores() const {
  ScoreMatrices result(spec_);
  each_row(spec_, [&](std::int64_t b, std::int64_t h, std::int64_t i) { row(b, h, i, &result); });
  return result;
}

// In numbers with at least 29 bits more than an engine's: for f64 that takes long double.
template <class Use>
auto in_wide_numbers(const Spec& spec, Use use) {
  if (spec.type == DType::f64) return use(Work(spec, Exact<Real>{}));
  return use(Work(spec, Exact<double>{}));
}

}  // namespace

Forward forward(const Spec& spec) {
  return in_wide_numbers(spec, [](const auto& work) { return work.forward(); });
}

Backward backward(const Spec& spec, const Array& grad_out) {
  return in_wide_numbers(spec, [&](const auto& work) { return work.backward(grad_out); });
}

std::pair<Forward, Backward> both(const Spec& spec, const Array& grad_out, ScoreMatrices* scores) {
  return in_wide_numbers(spec, [&](const auto& work) { return work.both(grad_out, scores); });
}

Backward eager_backward(const Spec& spec, const Array& grad_out, DType dtype) {
  if (dtype == DType::f64) return Work(spec, Eager<double>{dtype}).backward(grad_out);
  return Work(spec, Eager<float>{dtype}).backward(grad_out);
}

ScoreMatrices::ScoreMatrices(const Spec& spec) {
  const Dims sizes{spec.batch(), spec.heads(), spec.q.size(2), spec.k.size(2)};
  for (Array* one : {&scaled, &capped, &biased, &products, &magnitudes}) *one = Array(sizes);
}

ScoreMatrices scores(const Spec& spec) {
  return in_wide_numbers(spec, [](const auto& work) { return work.scores(); });
}

}  // namespace headway::test
