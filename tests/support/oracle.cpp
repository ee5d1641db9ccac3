#include "support/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headway::test {
namespace {

constexpr Real infinity = std::numeric_limits<Real>::infinity();

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

std::int64_t integer(Real value) { return static_cast<std::int64_t>(value); }

std::int64_t offset(const Spec& spec, std::int64_t b) {
  if (spec.causal == Causal::none) return spec.keys[at(b)] - spec.rows[at(b)];
  if (spec.causal != Causal::bottom_right) return 0;
  const bool per_item = spec.valid_lens && spec.valid_lens->sizes().size() == 1;
  const std::int64_t keys = per_item ? integer((*spec.valid_lens)(b)) : spec.keys[at(b)];
  const std::int64_t rows = spec.query_lens ? integer((*spec.query_lens)(b)) : spec.rows[at(b)];
  return keys - rows;
}

bool padding(const Spec& spec, std::int64_t b, std::int64_t i) {
  return i >= spec.rows[at(b)] || (spec.query_lens && i >= integer((*spec.query_lens)(b)));
}

// What dropout multiplies p(i,j) with: 0 or 1/(1-p).
Real kept(const Spec& spec, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  if (spec.dropout == 0) return 1;
  auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  const auto random = philox({word(j >> 2), word(i), word(h), word(b)},
                             {static_cast<std::uint32_t>(spec.seed), static_cast<std::uint32_t>(spec.seed >> 32)});
  const auto threshold = static_cast<std::uint64_t>(std::llround(std::ldexp(spec.dropout, 32)));
  return random[at(j & 3)] >= threshold ? 1 / (1 - static_cast<Real>(spec.dropout)) : 0;
}

// Arithmetic in Number, with what a matrix stores rounded by store().
struct Exact {
  using Number = Real;
  Number store(Number value) const { return value; }
};

template <class Sum>
struct Eager {
  using Number = Sum;
  DType dtype;
  Number store(Number value) const { return static_cast<Number>(rounded(dtype, static_cast<double>(value))); }
};

struct Score {
  Real scaled = 0, capped = 0, biased = 0;
  Real magnitude = 0;  // L's: |scale| sum |q k| + |bias| + |alibi|
};

// The score of one allowed pair after each stage.
template <class Arithmetic>
Score score(const Spec& spec, Arithmetic arithmetic, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  using Number = typename Arithmetic::Number;
  const std::int64_t g = h / (spec.heads() / spec.kv_heads());
  Number dot = 0, sum_of_sizes = 0;
  for (std::int64_t d = 0; d < spec.head_dim(); ++d) {
    const Number product = static_cast<Number>(spec.q(b, h, i, d)) * static_cast<Number>(spec.k(b, g, j, d));
    dot += product;
    sum_of_sizes += std::abs(product);
  }
  const auto scale = static_cast<Number>(spec.scale);
  Score result;
  result.scaled = result.capped = arithmetic.store(scale * dot);
  result.magnitude = std::abs(scale) * sum_of_sizes;
  if (spec.softcap) {
    const auto cap = static_cast<Number>(*spec.softcap);
    result.capped = arithmetic.store(cap * std::tanh(static_cast<Number>(result.scaled) / cap));
  }
  const Real bias = spec.bias ? spec.bias->repeated(b, h, i, j) : 0;
  const auto distance = static_cast<Real>(std::abs(i + offset(spec, b) - j));
  const Real alibi = spec.alibi_slopes ? -(*spec.alibi_slopes)(h)*distance : 0;
  result.biased =
      arithmetic.store(static_cast<Number>(result.capped) + static_cast<Number>(bias) + static_cast<Number>(alibi));
  result.magnitude += std::abs(bias) + std::abs(alibi);
  return result;
}

// One row of the matrix.
template <class Number>
struct Row {
  std::vector<std::int64_t> keys;  // the allowed ones
  std::vector<Number> p, keep;     // of each allowed key
  std::vector<Real> p_size;        // what p's relative error counts from: at least the smallest normal number
  std::vector<Number> tanh;        // of each allowed key, 0 without softcap
  Number lse = -std::numeric_limits<Number>::infinity();
  Number sink = 0;  // the sink's share of the row
  Real magnitude = 0;
};

template <class Arithmetic>
auto row_of(const Spec& spec, Arithmetic arithmetic, std::int64_t b, std::int64_t h, std::int64_t i) {
  using Number = typename Arithmetic::Number;
  Row<Number> row;
  if (padding(spec, b, i)) return row;
  std::vector<Number> s;
  const bool sink = spec.sinks.has_value();
  const Number sink_score = sink ? static_cast<Number>((*spec.sinks)(h)) : 0;
  Number largest = sink ? sink_score : -std::numeric_limits<Number>::infinity();
  for (std::int64_t j = 0; j < spec.keys[at(b)]; ++j) {
    if (!allowed(spec, b, h, i, j)) continue;
    const Score one = score(spec, arithmetic, b, h, i, j);
    row.keys.push_back(j);
    row.keep.push_back(static_cast<Number>(kept(spec, b, h, i, j)));
    row.tanh.push_back(spec.softcap ? static_cast<Number>(one.capped) / static_cast<Number>(*spec.softcap) : 0);
    row.magnitude = std::max(row.magnitude, one.magnitude);
    s.push_back(static_cast<Number>(one.biased));
    largest = std::max(largest, s.back());
  }
  if (row.keys.empty() && !sink) return row;
  Number sum = sink ? std::exp(sink_score - largest) : 0;
  for (Number one : s) sum += std::exp(one - largest);
  row.lse = largest + std::log(sum);
  if (sink) row.sink = std::exp(sink_score - row.lse);
  for (Number one : s) {
    row.p.push_back(arithmetic.store(std::exp(one - largest) / sum));
    row.p_size.push_back(row.p.back() + spec.smallest_normal);
  }
  return row;
}

template <class Visit>
void each_row(const Spec& spec, Visit visit) {
  for (std::int64_t b = 0; b < spec.batch(); ++b)
    for (std::int64_t h = 0; h < spec.heads(); ++h)
      for (std::int64_t i = 0; i < spec.rows[at(b)]; ++i) visit(b, h, i);
}

Bounded zeros(const Dims& sizes) { return {Array(sizes), Array(sizes), Array(sizes)}; }

// A sum that also keeps the sizes of its terms.
void add(Bounded& to, std::int64_t index, Real term, Real size, Real weight) {
  to.value.values[at(index)] += term;
  to.terms.values[at(index)] += size;
  to.weighted.values[at(index)] += weight * size;
}

// The row-major number of [b,h,i,0].
std::int64_t row_start(const Array& array, std::int64_t b, std::int64_t h, std::int64_t i) {
  return ((b * array.size(1) + h) * array.size(2) + i) * array.size(3);
}

// The gradients of one row, added to what the rows before it gave.
template <class Arithmetic>
void add_row_gradients(const Spec& spec, Arithmetic arithmetic, const Array& grad_out, std::int64_t b, std::int64_t h,
                       std::int64_t i, Backward& to) {
  using Number = typename Arithmetic::Number;
  const Row<Number> row = row_of(spec, arithmetic, b, h, i);
  if (row.keys.empty()) return;
  const std::int64_t g = h / (spec.heads() / spec.kv_heads());
  const Real weight = 16 + 4 * row.magnitude;
  std::vector<Number> dp(row.keys.size());     // dP = keep * <dO, v>
  std::vector<Real> dp_size(row.keys.size());  // keep * sum |dO v|
  Number delta = 0;                            // sum_j p dP
  Real delta_size = 0;
  for (std::size_t n = 0; n < row.keys.size(); ++n) {
    Number dot = 0, size = 0;
    for (std::int64_t d = 0; d < spec.value_dim(); ++d) {
      const Number product =
          static_cast<Number>(grad_out(b, h, i, d)) * static_cast<Number>(spec.v(b, g, row.keys[n], d));
      dot += product;
      size += std::abs(product);
    }
    dp[n] = row.keep[n] == 0 ? 0 : arithmetic.store(row.keep[n] * dot);
    dp_size[n] = row.keep[n] == 0 ? 0 : row.keep[n] * size;
    delta += row.p[n] * dp[n];
    delta_size += row.p_size[n] * dp_size[n];
  }
  for (std::size_t n = 0; n < row.keys.size(); ++n) {
    const std::int64_t j = row.keys[n];
    const Number ds = arithmetic.store(row.p[n] * (dp[n] - delta));
    const Real ds_size = row.p_size[n] * (dp_size[n] + delta_size);
    if (to.dbias) {
      const auto index = &spec.bias->repeated(b, h, i, j) - spec.bias->values.data();
      add(*to.dbias, index, ds, ds_size, weight);
    }
    const auto scale = static_cast<Number>(spec.scale);
    const Number before_cap = arithmetic.store(ds * (1 - row.tanh[n] * row.tanh[n]));
    const Real before_cap_size = ds_size * (1 + row.tanh[n] * row.tanh[n]);
    const std::int64_t q_row = row_start(spec.q, b, h, i), k_row = row_start(spec.k, b, g, j);
    for (std::int64_t d = 0; d < spec.head_dim(); ++d) {
      const auto q = static_cast<Number>(spec.q.values[at(q_row + d)]);
      const auto k = static_cast<Number>(spec.k.values[at(k_row + d)]);
      add(to.dq, q_row + d, before_cap * scale * k, before_cap_size * std::abs(scale * k), weight);
      add(to.dk, k_row + d, before_cap * scale * q, before_cap_size * std::abs(scale * q), weight);
    }
    if (row.keep[n] == 0) continue;
    const Number dropped = arithmetic.store(row.p[n] * row.keep[n]);
    const std::int64_t v_row = row_start(spec.v, b, g, j);
    for (std::int64_t d = 0; d < spec.value_dim(); ++d) {
      const auto gradient = static_cast<Number>(grad_out(b, h, i, d));
      add(to.dv, v_row + d, dropped * gradient, row.p_size[n] * row.keep[n] * std::abs(gradient), weight);
    }
  }
  if (to.dsinks) add(*to.dsinks, h, -row.sink * delta, row.sink * delta_size, weight);
}

template <class Arithmetic>
Backward backward_in(const Spec& spec, Arithmetic arithmetic, const Array& grad_out) {
  Backward result{zeros(spec.q.sizes()), zeros(spec.k.sizes()), zeros(spec.v.sizes()), {}, {}};
  if (spec.bias) result.dbias = zeros(spec.bias->sizes());
  if (spec.sinks) result.dsinks = zeros(spec.sinks->sizes());
  each_row(spec, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    add_row_gradients(spec, arithmetic, grad_out, b, h, i, result);
  });
  for (Bounded* one : {&result.dq, &result.dk, &result.dv})
    for (Real& value : one->value.values) value = arithmetic.store(static_cast<typename Arithmetic::Number>(value));
  return result;
}

}  // namespace

bool allowed(const Spec& spec, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  if (padding(spec, b, i) || j >= spec.keys[at(b)]) return false;
  const std::int64_t diagonal = i + offset(spec, b);
  if (spec.causal != Causal::none && j > diagonal) return false;
  if (spec.window.left && j < diagonal - *spec.window.left) return false;
  if (spec.window.right && j > diagonal + *spec.window.right) return false;
  if (spec.valid_lens) {
    const Array& lens = *spec.valid_lens;
    if (j >= integer(lens.sizes().size() == 1 ? lens(b) : lens(b, i))) return false;
  }
  if (spec.mask && spec.mask->repeated(b, h, i, j) == 0) return false;
  return !(spec.bias && spec.bias->repeated(b, h, i, j) == -infinity);
}

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

Forward forward(const Spec& spec) {
  const Dims lse_sizes{spec.batch(), spec.heads(), spec.q.size(2)};
  Forward result{zeros({spec.batch(), spec.heads(), spec.q.size(2), spec.value_dim()}),
                 zeros({spec.batch(), spec.heads(), spec.q.size(2), spec.k.size(2)}), zeros(lse_sizes)};
  std::fill(result.lse.value.values.begin(), result.lse.value.values.end(), -infinity);
  each_row(spec, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const Row<Real> row = row_of(spec, Exact{}, b, h, i);
    const std::int64_t g = h / (spec.heads() / spec.kv_heads());
    const Real weight = 16 + 4 * row.magnitude;
    const std::int64_t out_row = row_start(result.out.value, b, h, i);
    for (std::size_t n = 0; n < row.keys.size(); ++n) {
      const std::int64_t j = row.keys[n];
      add(result.weights, row_start(result.weights.value, b, h, i) + j, row.p[n], row.p[n], weight);
      if (row.keep[n] == 0) continue;
      for (std::int64_t d = 0; d < spec.value_dim(); ++d) {
        const Real value = row.keep[n] * spec.v(b, g, j, d);
        add(result.out, out_row + d, row.p[n] * value, row.p_size[n] * std::abs(value), weight);
      }
    }
    result.lse.value(b, h, i) = row.lse;
    result.lse.terms(b, h, i) = std::isinf(row.lse) ? 0 : std::abs(row.lse);
    result.lse.weighted(b, h, i) = std::isinf(row.lse) ? 0 : weight;
  });
  return result;
}

Backward backward(const Spec& spec, const Array& grad_out) { return backward_in(spec, Exact{}, grad_out); }

Backward eager_backward(const Spec& spec, const Array& grad_out, DType dtype) {
  if (dtype == DType::f64) return backward_in(spec, Eager<double>{dtype}, grad_out);
  return backward_in(spec, Eager<float>{dtype}, grad_out);
}

Array scores(const Spec& spec, Stage stage) {
  if (stage == Stage::weights) return forward(spec).weights.value;
  Array result({spec.batch(), spec.heads(), spec.q.size(2), spec.k.size(2)});
  each_row(spec, [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    for (std::int64_t j = 0; j < spec.keys[at(b)]; ++j) {
      const Score one = score(spec, Exact{}, b, h, i, j);
      const Real biased = allowed(spec, b, h, i, j) ? one.biased : -infinity;
      result(b, h, i, j) = stage == Stage::scaled ? one.scaled : stage == Stage::capped ? one.capped : biased;
    }
  });
  return result;
}

Array error_bound(const Bounded& exact, Kind kind, DType dtype, const Array* eager) {
  const bool half = dtype == DType::bf16 || dtype == DType::f16;
  const Real unit = dtype == DType::f64 ? 0x1p-53L : 0x1p-24L;
  const Real type_unit = !half || kind == Kind::lse ? 0 : dtype == DType::f16 ? 0x1p-11L : 0x1p-8L;
  const Real quantum = dtype == DType::f64    ? 0x1p-1074L
                       : dtype == DType::f16  ? 0x1p-24L
                       : dtype == DType::bf16 ? 0x1p-133L
                                              : 0x1p-149L;
  Real eager_error = 0;  // the largest, in units of the element's terms
  for (std::size_t n = 0; eager && n < exact.terms.values.size(); ++n)
    if (exact.terms.values[n] > 0)
      eager_error = std::max(eager_error, std::abs(eager->values[n] - exact.value.values[n]) / exact.terms.values[n]);
  Array bound(exact.value.sizes());
  for (std::size_t n = 0; n < bound.values.size(); ++n) {
    const Real terms = exact.terms.values[n];
    const Real weighted = exact.weighted.values[n] * (kind == Kind::weights ? 2 : 1);
    const Real relative = kind == Kind::lse ? 2 * unit : 2 * type_unit + 2 * eager_error;
    const bool nothing_to_round = terms == 0 && weighted == 0;
    bound.values[n] = nothing_to_round ? 0 : unit * weighted + relative * terms + 4 * quantum;
  }
  return bound;
}

}  // namespace headway::test
