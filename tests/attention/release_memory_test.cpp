// release_memory(): what is kept between calls goes back, and nothing else changes.
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <thread>
#include <vector>

#include "core/memory.h"
#include "headway/threads.h"
#include "support/call.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

const Shape shape{
    .batch = 2, .heads = 4, .kv_heads = 4, .queries = 300, .keys = 700, .head_dim = 128, .value_dim = 128};

GradientTensors gradients_of(const Inputs& inputs) {
  const Call call{inputs.q, inputs.k, inputs.v, {.engine = Engine::cpu}};
  return call.gradients(inputs.q);
}

TEST(ReleasedMemory, is_what_calls_kept_and_the_next_call_works) {
  if (exact_blocks) GTEST_SKIP() << "this build keeps nothing";
  const Inputs inputs = random_inputs(shape);
  const GradientTensors before = gradients_of(inputs);
  EXPECT_GE(release_memory(), 1 << 20);
  EXPECT_EQ(release_memory(), 0);
  const GradientTensors after = gradients_of(inputs);
  EXPECT_TRUE(same_bits(before, after));
  EXPECT_GE(release_memory(), 1 << 20);
}

TEST(ReleasedMemory, is_that_of_other_threads_too) {
  if (exact_blocks) GTEST_SKIP() << "this build keeps nothing";
  const Inputs inputs = random_inputs(shape);
  const int threads = get_threads();
  set_threads(1);
  std::latch called(1), released(1);
  release_memory();
  std::thread other([&] {
    gradients_of(inputs);
    release_memory();
    gradients_of(inputs);
    called.count_down();
    released.wait();
  });
  called.wait();
  const std::int64_t freed = release_memory();
  released.count_down();
  other.join();
  set_threads(threads);
  EXPECT_GE(freed, 1 << 20);
  EXPECT_EQ(release_memory(), 0);
}

TEST(ReleasedMemory, may_be_asked_for_while_calls_are_in_progress) {
  const Inputs inputs = random_inputs(shape);
  const GradientTensors expected = gradients_of(inputs);
  std::atomic<bool> ended{false};
  std::vector<std::thread> releasing;
  for (int n = 0; n < 2; ++n)
    releasing.emplace_back([&] {
      while (!ended) release_memory();
    });
  for (int n = 0; n < 20; ++n) EXPECT_TRUE(same_bits(gradients_of(inputs), expected));
  ended = true;
  for (std::thread& one : releasing) one.join();
}

}  // namespace
}  // namespace headway::test
