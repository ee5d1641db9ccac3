// A fixture for tests of gradients on the CUDA engine.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "attention/cuda_engine.h"
#include "support/inputs.h"

namespace headway::test {

class CudaBackward : public CudaEngine {
 protected:
  static Call on_cuda(const Inputs& inputs, AttentionOptions options) {
    options.engine = Engine::cuda;
    return inputs.call(options);
  }

  static Tensor grad_out_of(const Call& call) {
    Random random(5);
    return normal(call.out_sizes(), call.q.dtype(), random);
  }

  // Calls run one after another; what the oracle says to each is found beside, since it takes longer by far.
  class Checks {
   public:
    void add(const Call& call, std::string what) {
      Random random(1);
      Results results = call.run(!call.packing);
      Tensor grad_out = normal(call.out_sizes(), call.q.dtype(), random);
      GradientTensors gradients = call.gradients(grad_out, results);
      running_.push_back(
          std::async(std::launch::async, [call, what = std::move(what), results = std::move(results),
                                          grad_out = std::move(grad_out), gradients = std::move(gradients)]() mutable {
            SCOPED_TRACE(what);
            expect_forward(call, results);
            expect_backward(call, grad_out, gradients);
          }));
    }

   private:
    std::vector<std::future<void>> running_;  // each is waited for when it goes
  };

  static void expect_all_kinds(const Shape& shape, DType dtype) {
    const Inputs inputs = random_inputs(shape, dtype);
    const std::vector<OptionSet> kinds = all_kinds(shape);
    Checks checks;
    for (const OptionSet& kind : kinds)
      checks.add(on_cuda(inputs, kind.options), kind.name + " " + std::to_string(shape.head_dim));
  }
};

// NaN and infinities in the keys and values [B,1,Sk,D] that no row sees, and NaN in grad_out of rows that see nothing.
// How many rows that were.
inline int poison_what_no_row_sees(const Spec& spec, const Shape& shape, Inputs& inputs, Tensor& grad_out) {
  const double bad[] = {NAN, INFINITY, -INFINITY};
  int poisoned = 0;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t j = 0; j < shape.keys; ++j) {
      bool seen = false;
      for (std::int64_t h = 0; h < shape.heads; ++h)
        for (std::int64_t i = 0; i < shape.queries && !seen; ++i) seen = allowed(spec, b, h, i, j);
      if (seen) continue;
      const auto n = static_cast<std::size_t>(poisoned++);
      for (std::int64_t d = 0; d < shape.head_dim; ++d) {
        set(inputs.k, {b, 0, j, d}, bad[n % 3]);
        set(inputs.v, {b, 0, j, d}, bad[(n + 1) % 3]);
      }
    }
    for (std::int64_t h = 0; h < shape.heads; ++h)
      for (std::int64_t i = 0; i < shape.queries; ++i) {
        bool sees = false;
        for (std::int64_t j = 0; j < shape.keys && !sees; ++j) sees = allowed(spec, b, h, i, j);
        if (sees) continue;
        ++poisoned;
        for (std::int64_t d = 0; d < shape.head_dim; ++d) set(grad_out, {b, h, i, d}, NAN);
      }
  }
  return poisoned;
}

// Gradients [1,1,S,D]: NaN where hit(i, d) says that a poisoned row reaches them, else what they were before.
template <class Hit>
void expect_nan_where(const Tensor& now, const Tensor& before, const char* what, const Hit& hit) {
  for (std::int64_t i = 0; i < now.size(2); ++i)
    for (std::int64_t d = 0; d < now.size(3); ++d) {
      const auto value = static_cast<double>(get(now, {0, 0, i, d}));
      if (hit(i, d))
        EXPECT_TRUE(std::isnan(value)) << what << ' ' << i << ' ' << d;
      else
        EXPECT_EQ(value, static_cast<double>(get(before, {0, 0, i, d}))) << what << ' ' << i << ' ' << d;
    }
}

}  // namespace headway::test
