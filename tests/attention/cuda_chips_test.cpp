// What the CUDA engine would choose on chips that are not here: every launch fits the chip's shared memory. No GPU is
// needed, since nothing runs.
#include <gtest/gtest.h>

#include "attention/cuda_engine.h"
#include "core/validate.h"
#include "engines/cuda/backward.h"
#include "engines/cuda/forward.h"
#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/mean_weights_kernels.h"
#include "engines/cuda/pretended_device.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/scores.h"
#include "headway/attention.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

constexpr int kibi = 1024;
constexpr cuda::DeviceProperties chips[] = {{8, 0, 108, 163 * kibi}, {8, 6, 84, 99 * kibi},    {8, 9, 128, 99 * kibi},
                                            {9, 0, 132, 227 * kibi}, {10, 0, 148, 227 * kibi}, {12, 0, 170, 99 * kibi}};
constexpr DType types[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

alignas(16) char nothing[16];  // data that is never read

ConstTensorView on_device(DType dtype, const Dims& sizes) {
  return {nothing, dtype, sizes, Device{DeviceType::cuda, 0}};
}

struct Sizes {
  std::int64_t heads, kv_heads, queries, keys, dim, value_dim;
};

std::vector<Sizes> all_sizes() {
  std::vector<Sizes> result;
  for (const std::int64_t dim : {1, 8, 40, 64, 72, 96, 128, 136, 192, 256, 264, 512, 1000}) {
    for (const std::int64_t queries : {1, 5, 700}) {
      result.push_back({8, 2, queries, 20000, dim, dim});
      result.push_back({4, 4, queries, 600, dim, 64});
      for (const std::int64_t keys : {40, 64, 128, 256}) {  // which the backward has a kernel for
        result.push_back({4, 2, queries, keys, dim, dim});
      }
      result.push_back({4, 4, queries, 600, 64, dim});
    }
  }
  return result;
}

// With each option that decides about a kernel or its memory, and without.
template <class Check>
void with_options(DType dtype, const Sizes& s, const Check& check) {
  AttentionOptions plain;
  check(plain);
  AttentionOptions options;
  options.softcap = 20.0;
  options.mask = on_device(DType::b8, {1, 1, s.queries, s.keys});
  check(options);
  options.dropout = 0.1;
  options.seed = 1;
  options.bias = on_device(dtype, {1, s.heads, s.queries, s.keys});
  check(options);
  options = {};
  options.batch_invariant = true;
  options.causal = Causal::bottom_right;
  check(options);
  options = {};
  options.scale = 1e-25;
  check(options);
}

class Chips : public testing::TestWithParam<cuda::DeviceProperties> {
 protected:
  void expect_fits(const cuda::Launch& launch) const {
    EXPECT_LE(launch.shared_bytes, static_cast<std::size_t>(GetParam().shared_bytes)) << launch.name;
    EXPECT_GT(launch.threads, 0);
  }

  template <class Check>
  void for_problems(Pass pass, const Check& check) const {
    const cuda::PretendedDevice device(GetParam());
    for (const DType dtype : types) {
      for (const Sizes& s : all_sizes()) {
        SCOPED_TRACE(testing::Message() << name(dtype) << ' ' << s.queries << " x " << s.keys << ", dims " << s.dim
                                        << " and " << s.value_dim);
        with_options(dtype, s, [&](const AttentionOptions& options) {
          check(inputs_problem({.operation = "test",
                                .query = on_device(dtype, {2, s.heads, s.queries, s.dim}),
                                .key = on_device(dtype, {2, s.kv_heads, s.keys, s.dim}),
                                .value = on_device(dtype, {2, s.kv_heads, s.keys, s.value_dim}),
                                .options = options},
                               pass));
        });
      }
    }
  }
};

std::string chip_name(const testing::TestParamInfo<cuda::DeviceProperties>& chip) {
  return "sm_" + std::to_string(chip.param.major) + std::to_string(chip.param.minor);
}
INSTANTIATE_TEST_SUITE_P(, Chips, testing::ValuesIn(chips), chip_name);

TEST_P(Chips, have_shared_memory_for_every_forward) {
  for_problems(Pass::forward, [&](const Problem& problem) { expect_fits(cuda::choose_forward(problem).launch); });
}

TEST_P(Chips, have_shared_memory_for_every_gradient) {
  for_problems(Pass::backward, [&](const Problem& problem) {
    expect_fits(cuda::choose_backward(problem).launch);
    if (problem.bias) {
      cuda::BiasGradientArguments arguments{};
      static_cast<cuda::Arguments&>(arguments) = cuda::arguments_of(problem);
      expect_fits(cuda::simt_bias_gradient_launch(arguments, problem.dtype()));
    }
  });
}

TEST_P(Chips, have_shared_memory_for_scores_and_what_is_made_of_them) {
  for_problems(Pass::scores, [&](const Problem& problem) {
    expect_fits(cuda::choose_scores(problem));
    cuda::AnalysisArguments analysis{};
    static_cast<cuda::Arguments&>(analysis) = cuda::arguments_of(problem);
    expect_fits(cuda::choose_analysis(problem, analysis));
    cuda::MeanWeightsArguments mean{};
    static_cast<cuda::Arguments&>(mean) = cuda::arguments_of(problem);
    expect_fits(cuda::choose_mean_weights(problem, mean));
  });
}

TEST_P(Chips, are_told_why_a_faster_kernel_does_not_run) {
  const cuda::PretendedDevice device(GetParam());
  const ConstTensorView x = on_device(DType::bf16, {2, 8, 700, 200});
  const Plan plan = explain(x, x, x, {.causal = Causal::square});
  const bool hopper = GetParam().major == 9;
  EXPECT_EQ(plan.kernel.find("hopper_forward") != std::string::npos, hopper) << plan;
  const std::string said = to_string(plan);
  EXPECT_NE(said.find("  not      decode: more query rows"), std::string::npos) << said;
  EXPECT_EQ(said.find("  not      hopper_forward: compute capability") != std::string::npos, !hopper) << said;
  const bool small = GetParam().shared_bytes < 100 * kibi;
  EXPECT_EQ(said.find("  not      mma_forward: a block needs") != std::string::npos, small) << said;
}

// What a chip with 99 KiB of shared memory for a block would run, on the one that is here.
class SmallChip : public CudaEngine {};

TEST_F(SmallChip, gives_results_and_gradients_within_the_contracts_bounds) {
  for (const DType dtype : types)
    for (const std::int64_t dim : {40, 128, 200})
      for (const bool modified : {false, true}) {
        SCOPED_TRACE(testing::Message() << name(dtype) << ' ' << dim << (modified ? " modified" : ""));
        const Inputs inputs = random_inputs({.batch = 1,
                                             .heads = 4,
                                             .kv_heads = 2,
                                             .queries = 70,
                                             .keys = 150,
                                             .head_dim = dim,
                                             .value_dim = modified ? 72 : dim},
                                            dtype);
        Random random(3);
        const Tensor bias = normal({1, 4, 70, 150}, dtype, random);
        AttentionOptions options{.engine = Engine::cuda};
        if (modified) {
          options.softcap = 5.0;
          options.bias = bias;
        }
        const cuda::PretendedDevice device({8, 6, 84, 99 * kibi});
        expect_contract(inputs.call(options));
      }
}

}  // namespace
}  // namespace headway::test
