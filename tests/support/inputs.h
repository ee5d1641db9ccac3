// Random inputs of a shape, the kinds of masks and modifiers that the contract lists, and a fixture that runs a test on
// every engine of the build.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "support/call.h"
#include "support/strided.h"

namespace headway::test {

struct Shape {
  std::int64_t batch = 2, heads = 4, kv_heads = 2, queries = 5, keys = 7, head_dim = 8, value_dim = 6;
};

struct Inputs {
  Tensor q, k, v;

  Call call(const AttentionOptions& options = {}) const { return {q, k, v, options, {}}; }
};

Inputs random_inputs(const Shape& shape, DType dtype = DType::f32, std::uint64_t seed = 1);

// Options with the tensors they view.
struct OptionSet {
  std::string name;
  AttentionOptions options;
  std::vector<std::unique_ptr<Tensor>> storage;

  ConstTensorView keep(Tensor tensor);
};

// One set per way to forbid a key, each forbidding some key to every row; the last combines them.
std::vector<OptionSet> mask_kinds(const Shape& shape);
// One set per score modifier: scale, softcap, bias, ALiBi, sinks, dropout.
std::vector<OptionSet> modifier_kinds(const Shape& shape);
std::vector<OptionSet> all_kinds(const Shape& shape);

inline const std::vector<DType> float_types{DType::f32, DType::f64, DType::bf16, DType::f16};

// The engines that take tensors in host memory; and all of them (run.h brings tensors to where an engine reads).
std::vector<Engine> host_engines();
std::vector<Engine> tested_engines();

class EngineTest : public testing::TestWithParam<Engine> {
 protected:
  AttentionOptions on_engine(AttentionOptions options = {}) const {
    options.engine = GetParam();
    return options;
  }
};

}  // namespace headway::test

#define ON_ENGINES(Suite, list)                                                      \
  INSTANTIATE_TEST_SUITE_P(Engines, Suite, testing::ValuesIn(headway::test::list()), \
                           [](const testing::TestParamInfo<headway::Engine>& one) { return name(one.param); })
#define ON_EVERY_ENGINE(Suite) ON_ENGINES(Suite, tested_engines)
#define ON_EVERY_HOST_ENGINE(Suite) ON_ENGINES(Suite, host_engines)
