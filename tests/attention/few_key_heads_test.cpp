// Many query rows that share few key heads: the CPU engine shares their heads out to several tasks of its backward
// pass, whose parts of dK and dV it adds up.
#include <gtest/gtest.h>

#include "headway/threads.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

// One chunk of keys and, from 384 keys on, several; 5 heads in parts of 2 and 3.
const Shape one_chunk{
    .batch = 2, .heads = 5, .kv_heads = 1, .queries = 840, .keys = 300, .head_dim = 64, .value_dim = 40};
const Shape chunks{
    .batch = 1, .heads = 5, .kv_heads = 1, .queries = 1240, .keys = 520, .head_dim = 64, .value_dim = 40};

class FewKeyHeads : public EngineTest {
 protected:
  ~FewKeyHeads() override { set_threads(threads_before_); }

  Tensor grad_out_of(const Call& call) const {
    Random random(7);
    return normal(call.out_sizes(), call.q.dtype(), random);
  }

 private:
  int threads_before_ = get_threads();
};

Shape alone(Shape shape) {
  shape.batch = 1;
  return shape;
}

TEST_P(FewKeyHeads, of_many_queries_have_gradients_within_the_bounds) {
  for (const OptionSet& kind : all_kinds(alone(one_chunk))) {
    if (kind.name != "all masks" && kind.name != "all modifiers") continue;
    SCOPED_TRACE(kind.name);
    const Inputs inputs = random_inputs(alone(one_chunk), DType::f32);
    expect_contract(inputs.call(on_engine(kind.options)));
  }
  const Inputs inputs = random_inputs(chunks, DType::bf16);
  expect_contract(inputs.call(on_engine()));
}

TEST_P(FewKeyHeads, of_many_queries_have_the_same_bits_alone_and_on_any_number_of_threads) {
  for (const DType type : float_types) {
    const Inputs inputs = random_inputs(one_chunk, type);
    const Call call = inputs.call(on_engine({.causal = Causal::bottom_right}));
    const Tensor grad_out = grad_out_of(call);
    const Results results = call.run();
    set_threads(1);
    const GradientTensors gradients = call.gradients(grad_out, results);
    for (const int threads : {2, 5}) {
      set_threads(threads);
      EXPECT_TRUE(same_bits(call.gradients(grad_out, results), gradients)) << threads;
    }
    const auto item = [](const Tensor& tensor) { return tensor.view().slice(0, 1, 2); };
    const Call one{item(inputs.q), item(inputs.k), item(inputs.v), call.options, {}};
    const GradientTensors of_one = one.gradients(item(grad_out), one.run());
    EXPECT_TRUE(same_bits(of_one.dk, item(gradients.dk)));
    EXPECT_TRUE(same_bits(of_one.dv, item(gradients.dv)));
    EXPECT_TRUE(same_bits(of_one.dq, item(gradients.dq)));
  }
}

ON_EVERY_HOST_ENGINE(FewKeyHeads);

}  // namespace
}  // namespace headway::test
