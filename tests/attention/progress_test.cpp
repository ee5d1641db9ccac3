// The progress callback: monotone shares from the calling thread, and a way to stop.
#include <gtest/gtest.h>

#include <thread>

#include "support/inputs.h"

namespace headway::test {
namespace {

const Shape some_work{
    .batch = 2, .heads = 4, .kv_heads = 4, .queries = 96, .keys = 96, .head_dim = 16, .value_dim = 16};

class ProgressCallback : public EngineTest {};

TEST_P(ProgressCallback, hears_growing_shares_on_the_calling_thread) {
  const Inputs inputs = random_inputs(some_work);
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<double> shares;
  AttentionOptions options = on_engine();
  options.progress = [&](double share) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    shares.push_back(share);
    return true;
  };
  const Call call = inputs.call(options);
  const Results results = call.run();
  EXPECT_FALSE(shares.empty());
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  for (double share : shares) EXPECT_TRUE(share >= 0 && share <= 1) << share;
  EXPECT_TRUE(same_bits(results, inputs.call(on_engine()).run())) << "progress changed the result";
  shares.clear();
  call.gradients(results.out, results);
  EXPECT_FALSE(shares.empty());
}

TEST_P(ProgressCallback, that_returns_false_cancels_forward_and_backward) {
  const Inputs inputs = random_inputs(some_work);
  const Results results = inputs.call(on_engine()).run();
  AttentionOptions options = on_engine();
  options.progress = [](double) { return false; };
  const Call call = inputs.call(options);
  EXPECT_TRUE(throws<Cancelled>("attention", {}, [&] { call.run(); }));
  EXPECT_TRUE(throws<Cancelled>("attention_backward", {}, [&] { call.gradients(results.out, results); }));
  EXPECT_TRUE(same_bits(inputs.call(on_engine()).run(), results)) << "the next call works";
}

TEST_P(ProgressCallback, that_throws_passes_its_exception_on) {
  const Inputs inputs = random_inputs(some_work);
  AttentionOptions options = on_engine();
  options.progress = [](double) -> bool { throw std::out_of_range("the caller's own"); };
  EXPECT_THROW(inputs.call(options).run(), std::out_of_range);
  EXPECT_NO_THROW(inputs.call(on_engine()).run());
}

ON_EVERY_ENGINE(ProgressCallback);

}  // namespace
}  // namespace headway::test
