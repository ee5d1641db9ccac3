// Every gradient in f64 against central differences of the forward pass, under every mask and modifier; and, apart from
// the engines, the oracle's own gradients against differences of the oracle.
#include <gtest/gtest.h>

#include <cmath>

#include "support/inputs.h"

namespace headway::test {
namespace {

constexpr double step = 1e-5;
constexpr double tolerance = 2e-9;  // truncation step^2 and rounding 1e-16 / step, with room for the third derivative

// sum(grad_out * out) of a call.
double loss(const Call& call, const Tensor& grad_out) {
  Tensor out(call.out_sizes(), DType::f64);
  call.forward(out);
  double sum = 0;
  for (std::int64_t n = 0; n < out.elements(); ++n) sum += grad_out.as<double>()[n] * out.as<double>()[n];
  return sum;
}

// Compares `gradient` with differences in each element of `input`, which the call reads.
void expect_differences(const Call& call, const Tensor& grad_out, const Tensor& input, const Tensor& gradient,
                        const char* what) {
  auto* values = const_cast<double*>(input.as<double>());
  for (std::int64_t n = 0; n < input.elements(); ++n) {
    const double value = values[n];
    if (std::isinf(value)) {
      EXPECT_EQ(get(gradient, index_of(n, gradient.sizes())), 0) << what << " of a forbidden key, element " << n;
      continue;
    }
    values[n] = value + step;
    const double above = loss(call, grad_out);
    values[n] = value - step;
    const double below = loss(call, grad_out);
    values[n] = value;
    EXPECT_NEAR(get(gradient, index_of(n, gradient.sizes())), (above - below) / (2 * step), tolerance)
        << what << ", element " << n;
  }
}

class FiniteDifferences : public EngineTest {
 protected:
  void check(const Inputs& inputs, const OptionSet& kind, std::optional<Packing> packing = {}) const {
    SCOPED_TRACE(kind.name);
    const Call call{inputs.q, inputs.k, inputs.v, on_engine(kind.options), std::move(packing)};
    Random random(3);
    const Tensor grad_out = normal(call.out_sizes(), DType::f64, random);
    const GradientTensors gradients = call.gradients(grad_out);
    expect_differences(call, grad_out, inputs.q, gradients.dq, "dq");
    expect_differences(call, grad_out, inputs.k, gradients.dk, "dk");
    expect_differences(call, grad_out, inputs.v, gradients.dv, "dv");
    for (const auto& tensor : kind.storage) {
      const ConstTensorView view = static_cast<const Tensor&>(*tensor);
      if (call.options.bias && view.data() == call.options.bias->data())
        expect_differences(call, grad_out, *tensor, *gradients.dbias, "dbias");
      if (call.options.sinks && view.data() == call.options.sinks->data())
        expect_differences(call, grad_out, *tensor, *gradients.dsinks, "dsinks");
    }
  }
};

const Shape small{.batch = 2, .heads = 2, .kv_heads = 1, .queries = 3, .keys = 5, .head_dim = 3, .value_dim = 2};

TEST_P(FiniteDifferences, agree_with_every_gradient_under_every_mask_and_modifier) {
  for (const OptionSet& kind : all_kinds(small)) check(random_inputs(small, DType::f64), kind);
}

TEST_P(FiniteDifferences, agree_when_there_are_more_queries_than_keys) {
  const Shape tall{.batch = 1, .heads = 2, .kv_heads = 2, .queries = 6, .keys = 3, .head_dim = 2, .value_dim = 3};
  for (const OptionSet& kind : all_kinds(tall)) check(random_inputs(tall, DType::f64), kind);
}

TEST_P(FiniteDifferences, agree_for_packed_sequences) {
  Random random(4);
  const Inputs inputs{normal({5, 2, 3}, DType::f64, random), normal({7, 1, 3}, DType::f64, random),
                      normal({7, 1, 2}, DType::f64, random)};
  for (const OptionSet& kind : all_kinds({.batch = 2, .heads = 2, .kv_heads = 1, .queries = 3, .keys = 4}))
    if (!kind.options.valid_lens) check(inputs, kind, Packing{{0, 3, 5}, {0, 3, 7}});
}

TEST_P(FiniteDifferences, agree_through_a_broadcast_bias) {
  for (const Dims& sizes : {Dims{5}, Dims{3, 1}, Dims{2, 1, 1}, Dims{2, 1, 1, 5}, Dims{1, 1, 1, 1}}) {
    Random random(6);
    OptionSet kind{"bias", {}, {}};
    kind.options.bias = kind.keep(normal(sizes, DType::f64, random));
    check(random_inputs(small, DType::f64), kind);
  }
}

ON_EVERY_ENGINE(FiniteDifferences);

// The oracle's backward is itself checked: differences of its own forward in long double.
TEST(Oracle, its_gradients_are_the_differences_of_its_forward) {
  for (const OptionSet& kind : all_kinds(small)) {
    SCOPED_TRACE(kind.name);
    const Inputs inputs = random_inputs(small, DType::f64);
    Spec spec = spec_of(inputs.q, inputs.k, inputs.v, kind.options);
    Random random(3);
    const Array grad_out = read(normal({2, 2, 3, 2}, DType::f64, random));
    const auto loss_of = [&] {
      const Array out = forward(spec).out.value;
      Real sum = 0;
      for (std::size_t n = 0; n < out.values.size(); ++n) sum += out.values[n] * grad_out.values[n];
      return sum;
    };
    const Backward exact = backward(spec, grad_out);
    const auto compare = [&](Array& input, const Array& gradient, const char* what) {
      for (std::size_t n = 0; n < input.values.size(); ++n) {
        const Real value = input.values[n];
        if (std::isinf(value)) continue;
        constexpr Real small_step = 1e-6L;
        input.values[n] = value + small_step;
        const Real above = loss_of();
        input.values[n] = value - small_step;
        const Real below = loss_of();
        input.values[n] = value;
        ASSERT_NEAR(static_cast<double>(gradient.values[n]), static_cast<double>((above - below) / (2 * small_step)),
                    1e-10)
            << what << ", element " << n;
      }
    };
    compare(spec.q, exact.dq.value, "dq");
    compare(spec.k, exact.dk.value, "dk");
    compare(spec.v, exact.dv.value, "dv");
    if (spec.bias) compare(*spec.bias, exact.dbias->value, "dbias");
    if (spec.sinks) compare(*spec.sinks, exact.dsinks->value, "dsinks");
  }
}

// What section 3 compares gradients with: off by something, but by no more than a few roundings of each stored matrix.
TEST(Oracle, an_eager_implementation_has_the_error_of_its_type) {
  for (DType type : float_types) {
    const Inputs inputs = random_inputs(small, type);
    const Spec spec = spec_of(inputs.q, inputs.k, inputs.v, {});
    Random random(3);
    const Array grad_out = read(normal({2, 2, 3, 2}, type, random));
    const Backward exact = backward(spec, grad_out), eager = eager_backward(spec, grad_out, type);
    const Real unit = type == DType::f64   ? 0x1p-53L
                      : type == DType::f32 ? 0x1p-24L
                      : type == DType::f16 ? 0x1p-11L
                                           : 0x1p-8L;
    Real largest = 0;
    for (std::size_t n = 0; n < exact.dk.terms.values.size(); ++n)
      if (exact.dk.terms.values[n] > 0)
        largest =
            std::max(largest, std::abs(eager.dk.value.values[n] - exact.dk.value.values[n]) / exact.dk.terms.values[n]);
    EXPECT_GT(largest, 0) << name(type);
    EXPECT_LT(largest, 8 * unit) << name(type);
  }
}

}  // namespace
}  // namespace headway::test
