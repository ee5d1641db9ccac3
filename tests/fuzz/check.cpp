// Forward, backward and scores against the oracle.
#include "fuzz/check.h"

#include <cmath>
#include <sstream>

#include "support/run.h"

namespace headway::test::fuzz {
namespace {

// Above it a sum of f32 products may overflow on the way to a result that does not.
constexpr Real largest_promised_score = 1e38L, largest_sum = 1e36L;

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

}  // namespace

Prepared::Prepared(const Case& one) : materials(one) {
  if (one.subject == Subject::layer) return;
  const Call& call = materials.call;
  spec = call.spec();
  forward = test::forward(spec);
  if (!(forward.largest_score <= largest_promised_score)) {
    rejected = "scores past 1e38";
    return;
  }
  grad_out = gradient_as_padded(call, spec, materials.grad_out);
  backward = test::backward(spec, grad_out);
  const Real scale = std::abs(spec.scale), room = scale > 0 ? std::max<Real>(1, 1 / scale) : 1;
  // Open (docs/reliability.md): the slope of a softcap whose inverse a float cannot hold.
  const bool open = spec.type != DType::f64 && spec.softcap && *spec.softcap < 0x1p-126;
  gradients_in_range = backward.largest * room <= largest_sum && !open;
}

std::optional<std::string> outside(ConstTensorView actual, const Array& exact, const Array& bound, bool infinities) {
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

std::optional<std::string> differing(ConstTensorView actual, ConstTensorView expected) {
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
  const DType type = call.q.dtype();
  const bool infinities = prepared.materials.has_infinities;
  const Forward& exact = prepared.forward;
  call.forward(outputs.out.view(), outputs.views());
  const auto rows = [&](const Array& array) { return as_called(call, array, call.out_sizes(), false); };
  if (auto found = failure("out", outside(outputs.out.view(), rows(exact.out.value),
                                          rows(error_bound(exact.out, Kind::out, type)), infinities)))
    return found;
  const auto lse = [&](const Array& array) {
    return call.packing ? packed_lse(array, call.packing->starts_q) : array.reshaped(call.lse_sizes());
  };
  if (auto found = failure("lse", outside(outputs.lse.view(), lse(exact.lse.value),
                                          lse(error_bound(exact.lse, Kind::lse, type)), infinities)))
    return found;
  if (call.packing) return std::nullopt;
  const Dims sizes = call.weights_sizes();
  return failure("weights", outside(outputs.weights.view(), exact.weights.value.reshaped(sizes),
                                    error_bound(exact.weights, Kind::weights, type).reshaped(sizes), infinities));
}

std::optional<Failure> check_backward(const Prepared& prepared, const Call& call, Outputs& outputs) {
  const DType type = call.q.dtype();
  const Backward& exact = prepared.backward;
  const AttentionGradients gradients = outputs.gradients(call);
  call.backward(prepared.materials.grad_out, outputs.out.view(), outputs.lse.view(), gradients);
  if (!prepared.gradients_in_range) return std::nullopt;
  std::optional<Backward> eager;  // made only where the rest of the bound is not enough

  const auto compare = [&](const char* what, const std::optional<TensorView>& actual, const Bounded& one,
                           const std::function<const Array&(const Backward&)>& of, bool of_rows, bool of_keys) {
    const auto called = [&](const Array& array) {
      return of_rows ? as_called(call, array, actual->sizes(), of_keys) : array.reshaped(actual->sizes());
    };
    // A bias or sink may be of a narrower type than the call.
    const auto bound = [&](const Array* eager_values) {
      Array result = error_bound(one, Kind::gradient, type, eager_values);
      if (actual->dtype() == type || actual->dtype() == DType::f64) return called(result);
      const Array narrower = error_bound(one, Kind::gradient, actual->dtype());
      for (std::size_t n = 0; n < result.values.size(); ++n) result.values[n] += narrower.values[n];
      return called(result);
    };
    const bool infinities = prepared.materials.has_infinities;
    if (!outside(*actual, called(one.value), bound(nullptr), infinities)) return std::optional<Failure>{};
    if (!eager) eager = eager_backward(prepared.spec, prepared.grad_out, type);
    return failure(what, outside(*actual, called(one.value), bound(&of(*eager)), infinities));
  };
  std::optional<Failure> found = compare(
      "dq", gradients.dq, exact.dq, [](const Backward& one) -> const Array& { return one.dq.value; }, true, false);
  if (!found)
    found = compare(
        "dk", gradients.dk, exact.dk, [](const Backward& one) -> const Array& { return one.dk.value; }, true, true);
  if (!found)
    found = compare(
        "dv", gradients.dv, exact.dv, [](const Backward& one) -> const Array& { return one.dv.value; }, true, true);
  if (!found && gradients.dbias)
    found = compare(
        "dbias", gradients.dbias, *exact.dbias, [](const Backward& one) -> const Array& { return one.dbias->value; },
        false, false);
  if (!found && gradients.dsinks)
    found = compare(
        "dsinks", gradients.dsinks, *exact.dsinks,
        [](const Backward& one) -> const Array& { return one.dsinks->value; }, false, false);
  return found;
}

// The contract gives scores no bound of their own: here it is that of a dot product in one chain.
std::optional<Failure> check_scores(const Prepared& prepared, const Call& call) {
  const Spec& spec = prepared.spec;
  const DType type = call.q.dtype();
  const bool half = type == DType::bf16 || type == DType::f16;
  const Real unit = type == DType::f64 ? 0x1p-53L : 0x1p-24L;
  const Real type_unit = !half ? 0 : type == DType::f16 ? 0x1p-11L : 0x1p-8L;
  const Real quantum = type == DType::f64    ? 0x1p-1074L
                       : type == DType::f16  ? 0x1p-24L
                       : type == DType::bf16 ? 0x1p-133L
                                             : 0x1p-149L;
  const std::pair<Stage, const char*> stages[] = {
      {Stage::scaled, "scores scaled"}, {Stage::capped, "scores capped"}, {Stage::biased, "scores biased"}};
  const Real chain = static_cast<Real>(spec.head_dim()) / 2;
  Real most = 0;
  for (Real one : test::scores(spec, Stage::scaled).values)
    if (std::isfinite(one)) most = std::max(most, std::abs(one));
  if (most > largest_promised_score) return std::nullopt;  // of pairs that are forbidden later
  for (const auto& [stage, stage_name] : stages) {
    const Array exact = test::scores(spec, stage);
    const Array sizes = score_sizes(spec, stage);
    Array bound(exact.sizes());
    for (std::size_t n = 0; n < bound.values.size(); ++n) {
      if (std::isfinite(exact.values[n])) {
        bound.values[n] =
            unit * (8 + (8 + chain) * sizes.values[n]) + 2 * type_unit * std::abs(exact.values[n]) + 4 * quantum;
      }
    }
    Strided actual = prepared.materials.output(call.weights_sizes(), type);
    run_attention_scores(call.q, call.k, actual.view(), stage, call.options);
    if (auto found = outside(actual.view(), exact.reshaped(call.weights_sizes()), bound.reshaped(call.weights_sizes()),
                             prepared.materials.has_infinities))
      return Failure{stage_name, *found};
    if (!actual.surroundings_intact()) return Failure{stage_name, "memory beside the scores was written"};
  }
  return std::nullopt;
}

std::optional<Failure> check(const Prepared& prepared, Engine engine) {
  if (prepared.materials.what.subject == Subject::layer) return check_layer(prepared.materials.what, engine);
  Call call = prepared.materials.call;
  call.options.engine = engine;
  Outputs outputs(prepared.materials, call);
  if (auto found = check_forward(prepared, call, outputs)) return found;
  if (auto found = check_backward(prepared, call, outputs)) return found;
  if (!outputs.surroundings_intact()) return Failure{"surroundings", "memory beside a result was written"};
  if (auto found = check_bits(prepared, call, outputs)) return found;
  if (call.packing) return std::nullopt;
  if (auto found = check_scores(prepared, call)) return found;
  return check_analysis(prepared, call);
}

}  // namespace headway::test::fuzz
