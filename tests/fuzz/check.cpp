// Forward, backward and scores against the oracle.
#include "fuzz/check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <sstream>
#include <tuple>

#include "support/permission.h"
#include "support/run.h"
#include "support/units.h"

namespace headway::test::fuzz {
namespace {

// Above it a sum of f32 products may overflow on the way to a result that does not.
constexpr Real largest_promised_score = 1e38L, largest_sum = 1e36L;

std::int64_t comparison_count = 0;

Array as_called(const Call& call, const Array& exact, const Dims& sizes, bool of_keys) {
  if (!call.packing) return exact.reshaped(sizes);
  return packed(exact, of_keys ? call.packing->starts_k : call.packing->starts_q);
}

Array gradient_as_padded(const Call& call, const Spec& spec, ConstTensorView grad_out) {
  const Array gradient = read(grad_out);
  return call.packing ? padded(gradient, call.packing->starts_q)
                      : gradient.reshaped({spec.batch(), spec.heads(), spec.q.size(2), spec.value_dim()});
}

std::optional<Failure> failure(const std::string& check_name, const std::optional<std::string>& found) {
  if (!found) return std::nullopt;
  return Failure{check_name, *found};
}

// Whether all products of a query and a key are equal, or small multiples of one number, so that they round alike.
bool has_equal_products(const Case& one) {
  const auto is_level = [&](Numbers numbers, Layout layout) {
    const bool repeats_columns = layout == Layout::repeated_columns ||
                                 (layout == Layout::repeated_heads && one.form == Form::sd);  // of [S,D] the last axis
    return numbers == Numbers::constant || numbers == Numbers::integers || repeats_columns;
  };
  const Numbers queries = one.sharing == Sharing::all ? one.k : one.q;  // one tensor, with the numbers of the keys
  return is_level(queries, one.q_layout) && is_level(one.k, one.k_layout);
}

// Open (docs/reliability.md), as multiples of the bounds' multiple of L: heads of 32 to 63 add up 32 products one by
// one, wider ones 16 and then the sums of those, where equal ones round alike (up to 9 units of the score); bf16 dot
// products add up to 256 one by one, where integers round alike past 2^24 of them (18 units at head dim 219); and where
// one product makes most of a score, every product that is added to it later rounds it once more, and n such roundings
// come to about sqrt(n) units, or to n where the other products are equal. The bound of lse, unlike that of out and
// gradients, has what rounds lse itself on top.
struct OpenGrowth {
  Real of_scores = 1;  // lse and weights
  Real of_sums = 1;    // out and gradients
};

OpenGrowth open_growth(const Case& one) {
  const auto is_uneven = [](Numbers numbers) { return numbers == Numbers::channel || numbers == Numbers::wide; };
  const bool values_are_keys =
      one.sharing == Sharing::kv || one.sharing == Sharing::all || one.sharing == Sharing::columns;
  const bool planted = std::any_of(one.plants.begin(), one.plants.end(), [&](const Plant& plant) {
    return plant.odd == Odd::large && (plant.place == Place::query || plant.place == Place::key ||
                                       (values_are_keys && plant.place == Place::value));
  });
  OpenGrowth growth;
  if (one.d >= 32 && one.d < 64) growth.of_scores = 1.5L;
  const bool half = one.type == DType::bf16 || one.type == DType::f16, equal = has_equal_products(one);
  const auto width = static_cast<Real>(one.d);
  if (equal) growth = {2, 2};
  if (equal && one.type == DType::bf16 && one.d > 128)
    growth.of_scores = std::max<Real>(2, std::min<Real>(width, 256) / 64);
  // exp of a difference of some hundreds, rounded once more as its log2.
  if (one.type == DType::f64 && (one.q == Numbers::apart || one.k == Numbers::apart))
    growth.of_sums = std::max<Real>(growth.of_sums, 1.25L);
  if (!is_uneven(one.q) && !is_uneven(one.k) && !planted) return growth;
  const Real roundings = one.type == DType::bf16 ? width : std::min<Real>(width, 16 + width / 16);
  const Real uneven = std::max(2 * std::sqrt(roundings), equal ? roundings : 0);
  return {std::max(growth.of_scores, uneven / (half ? 8 : 4)),
          std::max<Real>(growth.of_sums, std::max<Real>(uneven / 4, 1.25L))};
}

void grow(Bounded& bounded, Real factor) {
  for (Real& weighted : bounded.weighted.values) weighted *= factor;
}

// Whether the sum of a row's values, each with a weight of up to 1 before the division by the sum of the weights, may
// overflow: the contract promises that it does not for values up to 1e18. Keys of up to 1e37 may be the values too.
bool sums_of_values_may_overflow(const Spec& spec, const Array& largest_values) {
  if (spec.type == DType::f64) return false;
  const Real most = largest_sum / static_cast<Real>(std::max<std::int64_t>(spec.k.size(2), 1));
  return std::any_of(largest_values.values.begin(), largest_values.values.end(),
                     [&](Real one) { return std::isfinite(one) && one > most; });
}

// Whether no output overflows its type: gradients begin with outputs as they were stored.
bool out_fits(const Array& out, DType type) {
  const Real most = static_cast<Real>(largest_finite(type)) * 0.98L;
  return std::all_of(out.values.begin(), out.values.end(),
                     [&](Real one) { return !std::isfinite(one) || std::abs(one) <= most; });
}

Expected expected(const Bounded& one, Kind kind, DType type, const std::function<Array(const Array&)>& called) {
  return {called(one.value), called(error_bound(one, kind, type))};
}

Array gradient_as_called(const ExpectedGradient& one, const Call& call, const Array& array) {
  return one.of_rows ? as_called(call, array, one.sizes, one.of_keys) : array.reshaped(one.sizes);
}

Array gradient_bound(const ExpectedGradient& one, const Backward& exact, const Call& call, const Array* eager) {
  const DType type = call.q.dtype();
  Array result = error_bound(one.of(exact), Kind::gradient, type, eager);
  if (one.type != type && one.type != DType::f64) {  // a bias or sink may be of a narrower type than the call
    const Array narrower = error_bound(one.of(exact), Kind::gradient, one.type);
    for (std::size_t n = 0; n < result.values.size(); ++n) result.values[n] += narrower.values[n];
  }
  return gradient_as_called(one, call, result);
}

std::vector<ExpectedGradient> expected_gradients(const Backward& exact, const Call& call) {
  const DType type = call.q.dtype();
  std::vector<ExpectedGradient> list;
  const auto add = [&](const char* name, const Bounded& (*of)(const Backward&), DType its_type, const Dims& sizes,
                       bool of_rows, bool of_keys) {
    ExpectedGradient& one = list.emplace_back(ExpectedGradient{name, of, its_type, sizes, of_rows, of_keys, {}});
    one.expected = {gradient_as_called(one, call, of(exact).value), gradient_bound(one, exact, call, nullptr)};
  };
  add(
      "dq", [](const Backward& one) -> const Bounded& { return one.dq; }, type, call.q.sizes(), true, false);
  add(
      "dk", [](const Backward& one) -> const Bounded& { return one.dk; }, type, call.k.sizes(), true, true);
  add(
      "dv", [](const Backward& one) -> const Bounded& { return one.dv; }, type, call.v.sizes(), true, true);
  const std::optional<ConstTensorView>&bias = call.options.bias, &sinks = call.options.sinks;
  if (bias)
    add(
        "dbias", [](const Backward& one) -> const Bounded& { return *one.dbias; }, bias->dtype(), bias->sizes(), false,
        false);
  if (sinks)
    add(
        "dsinks", [](const Backward& one) -> const Bounded& { return *one.dsinks; }, call.lse_type(), sinks->sizes(),
        false, false);
  return list;
}

// The contract gives scores no bound of their own: here it is that of a dot product in one chain.
std::vector<ExpectedScores> expected_scores(const Spec& spec, const ScoreMatrices& exact, const Dims& sizes) {
  const Real unit = unit_of(spec.type), type_unit = half_unit_of(spec.type), quantum = quantum_of(spec.type);
  const Real chain = static_cast<Real>(spec.head_dim()) / 2;
  for (Real one : exact.scaled.values)
    if (std::isfinite(one) && std::abs(one) > largest_promised_score) return {};  // of pairs that are forbidden later
  const auto bounded = [&](const Array& values, const Array& magnitudes) {
    Array bound(sizes);
    for (std::size_t n = 0; n < bound.values.size(); ++n)
      if (std::isfinite(values.values[n]))
        bound.values[n] =
            unit * (8 + (8 + chain) * magnitudes.values[n]) + 2 * type_unit * std::abs(values.values[n]) + 4 * quantum;
    return Expected{values.reshaped(sizes), std::move(bound)};
  };
  return {{Stage::scaled, "scores scaled", bounded(exact.scaled, exact.products)},
          {Stage::capped, "scores capped", bounded(exact.capped, exact.products)},
          {Stage::biased, "scores biased", bounded(exact.biased, exact.magnitudes)}};
}

}  // namespace

Sight::Sight(const Spec& spec)
    : heads_(spec.heads()),
      queries_(spec.q.size(2)),
      keys_(spec.k.size(2)),
      group_(spec.heads() / spec.kv_heads()),
      rows_(spec.rows) {
  sees_.reserve(static_cast<std::size_t>(spec.batch() * heads_ * queries_ * keys_));
  for (std::int64_t b = 0; b < spec.batch(); ++b)
    for (std::int64_t h = 0; h < heads_; ++h)
      for (std::int64_t i = 0; i < queries_; ++i) {
        const RowPermission permission(spec, b, h, i);
        for (std::int64_t j = 0; j < keys_; ++j) sees_.push_back(permission.allows(j));
      }
}

Prepared::Prepared(const Case& one) : materials(one) {
  if (one.subject == Subject::layer) {
    layer = expected_of_layer(materials.what);
    return;
  }
  if (one.subject == Subject::cache) return;
  const Call& call = materials.call;
  spec = call.spec();
  grad_out = gradient_as_padded(call, spec, materials.grad_out);
  ScoreMatrices exact_scores;
  std::tie(forward, backward) = both(spec, grad_out, call.packing ? nullptr : &exact_scores);
  if (!(forward.largest_score <= largest_promised_score)) {
    rejected = "scores past 1e38";
    return;
  }
  if (sums_of_values_may_overflow(spec, forward.out.limit)) {
    rejected = "values past 1e18, whose sum may overflow";
    return;
  }
  const OpenGrowth growth = open_growth(one);
  for (Bounded* bounded : {&forward.lse, &forward.weights}) grow(*bounded, growth.of_scores);
  for (Bounded* bounded : {&forward.out, &backward.dq, &backward.dk, &backward.dv}) grow(*bounded, growth.of_sums);
  const Real scale = std::abs(spec.scale), room = scale > 0 ? std::max<Real>(1, 1 / scale) : 1;
  if (backward.largest * room <= largest_sum && out_fits(forward.out.value, spec.type))
    gradients = expected_gradients(backward, call);
  sight = Sight(spec);
  out = expected(forward.out, Kind::out, spec.type,
                 [&](const Array& array) { return as_called(call, array, call.out_sizes(), false); });
  lse = expected(forward.lse, Kind::lse, spec.type, [&](const Array& array) {
    return call.packing ? packed_lse(array, call.packing->starts_q) : array.reshaped(call.lse_sizes());
  });
  if (call.packing) return;
  const Dims sizes = call.weights_sizes();
  weights =
      expected(forward.weights, Kind::weights, spec.type, [&](const Array& array) { return array.reshaped(sizes); });
  scores = expected_scores(spec, exact_scores, sizes);
  scores.push_back({Stage::weights, "scores weights", weights});
}

std::optional<std::string> outside(ConstTensorView actual, const Array& exact, const Array& bound, bool infinities) {
  ++comparison_count;
  const Array found = read(actual);
  const Real most = largest_finite(actual.dtype());
  std::size_t wrong = 0, worst = 0;
  Real worst_excess = -1;
  for (std::size_t n = 0; n < found.values.size(); ++n) {
    const Real a = found.values[n], e = exact.values[n], allowed_error = bound.values[n];
    if (a == e || (std::isnan(a) && std::isnan(e))) continue;
    if (infinities && !std::isfinite(a) && !std::isfinite(e)) continue;
    if (std::isinf(a) && std::isfinite(e) && (a > 0 ? e : -e) + allowed_error >= most) continue;
    Real excess = std::abs(a - e) - allowed_error;
    if (excess <= 0) continue;
    if (!std::isfinite(excess)) excess = std::numeric_limits<Real>::infinity();
    ++wrong;
    if (excess > worst_excess) {
      worst = n;
      worst_excess = excess;
    }
  }
  if (wrong == 0) return std::nullopt;
  std::ostringstream text;
  text.precision(9);
  text << "element " << index_of(static_cast<std::int64_t>(worst), exact.sizes()) << ": got " << found.values[worst]
       << ", expected " << exact.values[worst] << ", off by " << std::abs(found.values[worst] - exact.values[worst])
       << ", bound " << bound.values[worst] << " (" << wrong << " of " << found.elements() << " elements)";
  return text.str();
}

std::int64_t comparisons() { return comparison_count; }

std::optional<std::string> differing(ConstTensorView actual, ConstTensorView expected) {
  ++comparison_count;
  if (same_bits(actual, expected)) return std::nullopt;
  std::ostringstream text;
  text.precision(9);
  std::size_t wrong = 0;
  each_index(actual.sizes(), [&](const Dims& index) {
    const auto element = [&](ConstTensorView view) {
      for (int axis = 0; axis < index.size(); ++axis) view = view.slice(axis, index[axis], index[axis] + 1);
      return view;
    };
    if (same_bits(element(actual), element(expected))) return;
    if (std::isnan(get(actual, index)) && std::isnan(get(expected, index))) return;  // which NaN is not promised
    if (wrong++ == 0)
      text << "element " << index << ": " << get(actual, index) << " instead of the bits of " << get(expected, index);
  });
  if (wrong == 0) return std::nullopt;
  text << " (" << wrong << " of " << actual.elements() << " elements)";
  return text.str();
}

Outputs::Outputs(const Materials& materials, const Call& call)
    : out(materials.output(call.out_sizes(), call.q.dtype())),
      lse(materials.output(call.lse_sizes(), call.lse_type())),
      weights(materials.output(call.packing ? Dims{0} : call.weights_sizes(), call.q.dtype())),
      dq(materials.output(call.q.sizes(), call.q.dtype())),
      dk(materials.output(call.k.sizes(), call.q.dtype())),
      dv(materials.output(call.v.sizes(), call.q.dtype())) {
  if (call.options.bias) dbias = materials.output(call.options.bias->sizes(), call.options.bias->dtype());
  if (call.options.sinks) dsinks = materials.output(call.options.sinks->sizes(), call.lse_type());
}

AttentionOutputs Outputs::views(bool want_weights) {
  AttentionOutputs result{.lse = lse.view(), .weights = {}};
  if (want_weights && weights.view().rank() > 1) result.weights = weights.view();
  return result;
}

AttentionGradients Outputs::gradients(const Call& call) {
  AttentionGradients result{dq.view(), dk.view(), dv.view(), {}, {}};
  if (call.options.bias) result.dbias = dbias.view();
  if (call.options.sinks) result.dsinks = dsinks.view();
  return result;
}

bool Outputs::surroundings_intact() const {
  for (const Strided* one : {&out, &lse, &weights, &dq, &dk, &dv, &dbias, &dsinks})
    if (!one->surroundings_intact()) return false;
  return true;
}

std::optional<Failure> check_forward(const Prepared& prepared, const Call& call, Outputs& outputs) {
  const bool infinities = prepared.materials.has_infinities;
  call.forward(outputs.out.view(), outputs.views());
  if (auto found = failure("out", outside(outputs.out.view(), prepared.out, infinities))) return found;
  if (auto found = failure("lse", outside(outputs.lse.view(), prepared.lse, infinities))) return found;
  if (call.packing) return std::nullopt;
  return failure("weights", outside(outputs.weights.view(), prepared.weights, infinities));
}

std::optional<Failure> check_backward(const Prepared& prepared, const Call& call, Outputs& outputs) {
  const AttentionGradients views = outputs.gradients(call);
  call.backward(prepared.materials.grad_out, outputs.out.view(), outputs.lse.view(), views);
  std::vector<TensorView> actual{*views.dq, *views.dk, *views.dv};
  if (views.dbias) actual.push_back(*views.dbias);
  if (views.dsinks) actual.push_back(*views.dsinks);
  return check_gradients(prepared, call, actual);
}

std::optional<Failure> check_gradients(const Prepared& prepared, const Call& call,
                                       const std::vector<TensorView>& actual) {
  const bool infinities = prepared.materials.has_infinities;
  std::optional<Backward> eager;  // made only where the rest of the bound is not enough
  for (std::size_t n = 0; n < prepared.gradients.size(); ++n) {
    const ExpectedGradient& one = prepared.gradients[n];
    if (!outside(actual[n], one.expected, infinities)) continue;
    if (!eager) eager = eager_backward(prepared.spec, prepared.grad_out, call.q.dtype());
    const Array bound = gradient_bound(one, prepared.backward, call, &one.of(*eager).value);
    if (auto found = failure(one.name, outside(actual[n], one.expected.exact, bound, infinities))) return found;
  }
  return std::nullopt;
}

std::optional<Failure> check_scores(const Prepared& prepared, const Call& call) {
  for (const ExpectedScores& one : prepared.scores) {
    Strided actual = prepared.materials.output(call.weights_sizes(), call.q.dtype());
    run_attention_scores(call.q, call.k, actual.view(), one.stage, call.options);
    if (auto found = outside(actual.view(), one.expected, prepared.materials.has_infinities))
      return Failure{one.name, *found};
    if (!actual.surroundings_intact()) return Failure{one.name, "memory beside the scores was written"};
  }
  return std::nullopt;
}

std::optional<Failure> check(const Prepared& prepared, Engine engine, bool batch_invariant) {
  if (prepared.materials.what.subject == Subject::layer) return check_layer(prepared, engine);
  if (prepared.materials.what.subject == Subject::cache) return check_cache(prepared, engine);
  Call call = prepared.materials.call;
  call.options.engine = engine;
  call.options.batch_invariant = batch_invariant;
  Outputs outputs(prepared.materials, call);
  if (auto found = check_forward(prepared, call, outputs)) return found;
  if (auto found = check_backward(prepared, call, outputs)) return found;
  if (!outputs.surroundings_intact()) return Failure{"surroundings", "memory beside a result was written"};
  if (auto found = check_bits(prepared, call, outputs)) return found;
  if (engine != Engine::cuda)
    if (auto found = check_split(prepared, call)) return found;
  if (call.packing) return std::nullopt;
  if (auto found = check_scores(prepared, call)) return found;
  return check_analysis(prepared, call);
}

}  // namespace headway::test::fuzz
