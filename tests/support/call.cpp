#include "support/call.h"

#include <cmath>
#include <limits>

#include "support/run.h"
#include "support/strided.h"

namespace headway::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

Tensor starts_tensor(const std::vector<std::int64_t>& starts) {
  return Tensor::of<std::int64_t>({static_cast<std::int64_t>(starts.size())}, starts);
}

// sizes without the last axis, then `more`.
Dims leading(const Dims& sizes, std::initializer_list<std::int64_t> more) {
  Dims result;
  for (int axis = 0; axis + 1 < sizes.size(); ++axis) result.push_back(sizes[axis]);
  for (std::int64_t size : more) result.push_back(size);
  return result;
}

Array as_called(const Array& exact, const Dims& sizes, const Packing* packing, bool of_keys) {
  if (!packing) return exact.reshaped(sizes);
  return packed(exact, of_keys ? packing->starts_k : packing->starts_q);
}

Bounded as_called(const Bounded& exact, const Dims& sizes, const Packing* packing, bool of_keys) {
  return {as_called(exact.value, sizes, packing, of_keys), as_called(exact.terms, sizes, packing, of_keys),
          as_called(exact.weighted, sizes, packing, of_keys), as_called(exact.limit, sizes, packing, of_keys)};
}

bool same(const std::optional<Tensor>& a, const std::optional<Tensor>& b) {
  return a.has_value() == b.has_value() && (!a || same_bits(*a, *b));
}

}  // namespace

Spec Call::spec() const { return packing ? spec_of(q, k, v, *packing, options) : spec_of(q, k, v, options); }

Dims Call::out_sizes() const { return leading(q.sizes(), {v.sizes().back()}); }

Dims Call::lse_sizes() const { return packing ? Dims{q.size(1), q.size(0)} : leading(q.sizes(), {}); }

Dims Call::weights_sizes() const { return leading(q.sizes(), {k.size(k.rank() - 2)}); }

void Call::forward(TensorView out, const AttentionOutputs& outputs) const {
  if (!packing) return run_attention(q, k, v, out, options, outputs);
  const Tensor starts_q = starts_tensor(packing->starts_q), starts_k = starts_tensor(packing->starts_k);
  run_attention_varlen(q, k, v, starts_q, starts_k, out, options, outputs);
}

void Call::backward(ConstTensorView grad_out, ConstTensorView out, ConstTensorView lse,
                    const AttentionGradients& gradients) const {
  if (!packing) return run_attention_backward(grad_out, q, k, v, out, lse, gradients, options);
  const Tensor starts_q = starts_tensor(packing->starts_q), starts_k = starts_tensor(packing->starts_k);
  run_attention_varlen_backward(grad_out, q, k, v, out, lse, starts_q, starts_k, gradients, options);
}

Results Call::run(bool weights) const {
  Results results{filled(out_sizes(), q.dtype(), nan), filled(lse_sizes(), lse_type(), nan), {}};
  AttentionOutputs outputs{.lse = results.lse, .weights = {}};
  if (weights) {
    results.weights = filled(weights_sizes(), q.dtype(), nan);
    outputs.weights = *results.weights;
  }
  forward(results.out, outputs);
  return results;
}

GradientTensors Call::gradients(ConstTensorView grad_out, const Results& results) const {
  GradientTensors made{
      filled(q.sizes(), q.dtype(), nan), filled(k.sizes(), q.dtype(), nan), filled(v.sizes(), q.dtype(), nan), {}, {}};
  AttentionGradients views{made.dq.view(), made.dk.view(), made.dv.view(), {}, {}};
  if (options.bias) {
    made.dbias = filled(options.bias->sizes(), lse_type(), nan);
    views.dbias = *made.dbias;
  }
  if (options.sinks) {
    made.dsinks = filled(options.sinks->sizes(), lse_type(), nan);
    views.dsinks = *made.dsinks;
  }
  backward(grad_out, results.out, results.lse, views);
  return made;
}

testing::AssertionResult within(const Array& actual, const Array& exact, const Array& bound) {
  if (!(actual.sizes() == exact.sizes()))
    return testing::AssertionFailure() << "shape " << actual.sizes() << " instead of " << exact.sizes();
  std::int64_t wrong = 0, worst = 0;
  Real worst_excess = -1;
  for (std::int64_t n = 0; n < actual.elements(); ++n) {
    const auto at = static_cast<std::size_t>(n);
    const Real a = actual.values[at], e = exact.values[at];
    if (a == e || (std::isnan(a) && std::isnan(e))) continue;
    const Real excess = std::abs(a - e) - bound.values[at];
    if (excess <= 0) continue;
    ++wrong;
    if (std::isnan(excess) || excess > worst_excess) {
      worst = n;
      worst_excess = std::isnan(excess) ? std::numeric_limits<Real>::infinity() : excess;
    }
  }
  if (wrong == 0) return testing::AssertionSuccess();
  const auto at = static_cast<std::size_t>(worst);
  return testing::AssertionFailure() << wrong << " of " << actual.elements() << " elements; at "
                                     << index_of(worst, actual.sizes()) << ": " << actual.values[at] << " instead of "
                                     << exact.values[at] << ", off by "
                                     << std::abs(actual.values[at] - exact.values[at]) << ", bound "
                                     << bound.values[at];
}

testing::AssertionResult within(ConstTensorView actual, const Array& exact, const Array& bound) {
  return within(read(actual), exact, bound);
}

namespace {

void compare_forward(const Call& call, const Forward& exact, ConstTensorView out, const AttentionOutputs& outputs) {
  const Packing* packing = call.packing ? &*call.packing : nullptr;
  const DType type = call.q.dtype();
  const Bounded exact_out = as_called(exact.out, call.out_sizes(), packing, false);
  EXPECT_TRUE(within(out, exact_out.value, error_bound(exact_out, Kind::out, type))) << "out";
  if (outputs.lse) {
    const Array bound = error_bound(exact.lse, Kind::lse, type);
    const auto called = [&](const Array& lse) {
      return packing ? packed_lse(lse, packing->starts_q) : lse.reshaped(call.lse_sizes());
    };
    EXPECT_TRUE(within(*outputs.lse, called(exact.lse.value), called(bound))) << "lse";
  }
  if (outputs.weights) {
    const Bounded weights = as_called(exact.weights, call.weights_sizes(), nullptr, false);
    EXPECT_TRUE(within(*outputs.weights, weights.value, error_bound(weights, Kind::weights, type))) << "weights";
  }
}

// The gradient of the output as the oracle takes it.
Array padded_gradient(const Call& call, const Spec& spec, ConstTensorView grad_out) {
  const Array gradient = read(grad_out);
  return call.packing ? padded(gradient, call.packing->starts_q)
                      : gradient.reshaped({spec.batch(), spec.heads(), spec.q.size(2), spec.value_dim()});
}

void compare_backward(const Call& call, const Spec& spec, const Array& grad_out, const Backward& exact,
                      const AttentionGradients& gradients) {
  const Packing* packing = call.packing ? &*call.packing : nullptr;
  const DType type = call.q.dtype();
  // Whatever the engine, the half types' backward starts from an out that was rounded to them.
  const bool rounded_out = type == DType::bf16 || type == DType::f16;
  const bool may_be_eager = call.options.engine != Engine::reference || rounded_out;
  std::optional<Backward> eager;  // made only where the rest of the bound is not enough

  auto compare = [&](const char* what, const std::optional<TensorView>& actual, const Bounded& exact_one,
                     const auto& of_eager, bool of_keys, bool of_rows) {
    if (!actual) return;
    const Packing* packed_as = of_rows ? packing : nullptr;
    const Bounded called = as_called(exact_one, actual->sizes(), packed_as, of_keys);
    const auto is_within = [&](const Array* eager_value) {
      // A gradient may be asked for in a narrower type than the call's.
      Array bound = error_bound(called, Kind::gradient, type, eager_value);
      if (actual->dtype() != type && actual->dtype() != DType::f64) {
        const Array narrower = error_bound(called, Kind::gradient, actual->dtype());
        for (std::size_t n = 0; n < bound.values.size(); ++n) bound.values[n] += narrower.values[n];
      }
      return within(*actual, called.value, bound);
    };
    testing::AssertionResult result = is_within(nullptr);
    if (!result && may_be_eager) {
      if (!eager) eager = eager_backward(spec, grad_out, type);
      const Array value = as_called(of_eager(*eager).value, actual->sizes(), packed_as, of_keys);
      result = is_within(&value);
    }
    EXPECT_TRUE(result) << what;
  };
  const auto dq_of = [](const Backward& one) -> const Bounded& { return one.dq; };
  const auto dk_of = [](const Backward& one) -> const Bounded& { return one.dk; };
  const auto dv_of = [](const Backward& one) -> const Bounded& { return one.dv; };
  const auto dbias_of = [](const Backward& one) -> const Bounded& { return *one.dbias; };
  const auto dsinks_of = [](const Backward& one) -> const Bounded& { return *one.dsinks; };
  compare("dq", gradients.dq, exact.dq, dq_of, false, true);
  compare("dk", gradients.dk, exact.dk, dk_of, true, true);
  compare("dv", gradients.dv, exact.dv, dv_of, true, true);
  if (exact.dbias) compare("dbias", gradients.dbias, *exact.dbias, dbias_of, false, false);
  if (exact.dsinks) compare("dsinks", gradients.dsinks, *exact.dsinks, dsinks_of, false, false);
}

AttentionOutputs outputs_of(const Results& results) {
  AttentionOutputs outputs{.lse = const_cast<Results&>(results).lse.view(), .weights = {}};
  if (results.weights) outputs.weights = const_cast<Tensor&>(*results.weights).view();
  return outputs;
}

AttentionGradients views_of(GradientTensors& gradients) {
  AttentionGradients views{gradients.dq.view(), gradients.dk.view(), gradients.dv.view(), {}, {}};
  if (gradients.dbias) views.dbias = *gradients.dbias;
  if (gradients.dsinks) views.dsinks = *gradients.dsinks;
  return views;
}

}  // namespace

void expect_forward(const Call& call, ConstTensorView out, const AttentionOutputs& outputs) {
  compare_forward(call, forward(call.spec()), out, outputs);
}

void expect_forward(const Call& call, const Results& results) {
  expect_forward(call, results.out, outputs_of(results));
}

void expect_backward(const Call& call, ConstTensorView grad_out, const AttentionGradients& gradients) {
  const Spec spec = call.spec();
  const Array gradient = padded_gradient(call, spec, grad_out);
  compare_backward(call, spec, gradient, backward(spec, gradient), gradients);
}

void expect_backward(const Call& call, ConstTensorView grad_out, GradientTensors& gradients) {
  expect_backward(call, grad_out, views_of(gradients));
}

void expect_contract(const Call& call, std::uint64_t seed) {
  Random random(seed);
  const Results results = call.run(!call.packing);
  const Tensor grad_out = normal(call.out_sizes(), call.q.dtype(), random);
  GradientTensors gradients = call.gradients(grad_out, results);
  const Spec spec = call.spec();
  const Array gradient = padded_gradient(call, spec, grad_out);
  const auto [exact_forward, exact_backward] = both(spec, gradient);
  compare_forward(call, exact_forward, results.out, outputs_of(results));
  compare_backward(call, spec, gradient, exact_backward, views_of(gradients));
}

bool same_bits(const Results& a, const Results& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same(a.weights, b.weights);
}

bool same_bits(const GradientTensors& a, const GradientTensors& b) {
  return same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv) && same(a.dbias, b.dbias) &&
         same(a.dsinks, b.dsinks);
}

}  // namespace headway::test
