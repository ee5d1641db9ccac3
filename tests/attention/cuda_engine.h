// A fixture for tests of the CUDA engine's own, skipped with the engine's reason where it cannot run.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "headway/attention.h"

namespace headway::test {

// From a fixture's SetUp.
inline void skip_without_cuda() {
  const std::vector<Engine> there = engines();
  if (std::find(there.begin(), there.end(), Engine::cuda) == there.end()) {
    const Tensor one({1, 1, 1, 1});
    try {
      explain(one, one, one, {.engine = Engine::cuda});
    } catch (const Unsupported& error) {
      GTEST_SKIP() << error.what();
    }
  }
}

class CudaEngine : public testing::Test {
 protected:
  void SetUp() override { skip_without_cuda(); }
};

}  // namespace headway::test
