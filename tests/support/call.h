// One attention call, dense or packed, that a test runs on an engine and compares with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "headway/attention.h"
#include "support/oracle.h"

namespace headway::test {

struct Results {
  Tensor out, lse;
  std::optional<Tensor> weights;
};

struct GradientTensors {
  Tensor dq, dk, dv;
  std::optional<Tensor> dbias, dsinks;
};

struct Call {
  ConstTensorView q, k, v;
  AttentionOptions options = {};
  std::optional<Packing> packing = {};

  Spec spec() const;
  Dims out_sizes() const;
  Dims lse_sizes() const;
  Dims weights_sizes() const;
  DType lse_type() const { return q.dtype() == DType::f64 ? DType::f64 : DType::f32; }

  void forward(TensorView out, const AttentionOutputs& outputs = {}) const;
  void backward(ConstTensorView grad_out, ConstTensorView out, ConstTensorView lse,
                const AttentionGradients& gradients) const;

  // The same into new, contiguous tensors, which hold NaN beforehand.
  Results run(bool weights = false) const;
  GradientTensors gradients(ConstTensorView grad_out, const Results& results) const;
  GradientTensors gradients(ConstTensorView grad_out) const { return gradients(grad_out, run()); }
};

// |actual - exact| <= bound in every element, NaN equal to NaN; else the worst element.
testing::AssertionResult within(const Array& actual, const Array& exact, const Array& bound);
testing::AssertionResult within(ConstTensorView actual, const Array& exact, const Array& bound);

// Compares what the call wrote with the oracle, under section 3's bounds.
void expect_forward(const Call& call, ConstTensorView out, const AttentionOutputs& outputs = {});
void expect_forward(const Call& call, const Results& results);

// The reference engine is held to more than the contract: but for half types, whose out comes to it rounded, it gets
// none of an eager implementation's error.
void expect_backward(const Call& call, ConstTensorView grad_out, const AttentionGradients& gradients);
void expect_backward(const Call& call, ConstTensorView grad_out, GradientTensors& gradients);

// Runs forward and backward and compares both.
void expect_contract(const Call& call, std::uint64_t seed = 1);

bool same_bits(const Results& a, const Results& b);
bool same_bits(const GradientTensors& a, const GradientTensors& b);

// Runs the statement, which must throw exactly Exception with a text that starts with `operation` + ": " and holds
// every one of `parts`.
template <class Exception, class Run>
testing::AssertionResult throws(const std::string& operation, const std::vector<std::string>& parts, Run run) {
  try {
    run();
  } catch (const Error& error) {
    const std::string text = error.what();
    if (typeid(error) != typeid(Exception)) return testing::AssertionFailure() << "another class, with: " << text;
    if (text.rfind(operation + ": ", 0) != 0)
      return testing::AssertionFailure() << "not from " << operation << ": " << text;
    for (const std::string& part : parts)
      if (text.find(part) == std::string::npos)
        return testing::AssertionFailure() << "no '" << part << "' in: " << text;
    return testing::AssertionSuccess();
  } catch (const std::exception& error) {
    return testing::AssertionFailure() << "not a headway::Error: " << error.what();
  }
  return testing::AssertionFailure() << "nothing was thrown";
}

}  // namespace headway::test
