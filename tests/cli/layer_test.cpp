// headway layer, layer-init and random.
#include "cli_support.h"

namespace headway::test {
namespace {

class LayerCommand : public CommandTest {};

TEST_F(LayerCommand, layer_init_writes_what_the_constructor_draws) {
  const Finished finished = run({"layer-init",
                                 "--model-dim",
                                 "12",
                                 "--heads",
                                 "4",
                                 "--kv-heads",
                                 "2",
                                 "--head-dim",
                                 "5",
                                 "--key-dim",
                                 "7",
                                 "--value-dim",
                                 "6",
                                 "--bias",
                                 "--dtype",
                                 "f64",
                                 "--initializer",
                                 "torch_linear",
                                 "--seed",
                                 "9",
                                 "-o",
                                 "layer.safetensors"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.out, "layer.safetensors  model_dim 12, 4 heads of 5, f64  662 parameters\n");
  const MultiHeadAttention stored = MultiHeadAttention::load(file("layer.safetensors"));
  const MultiHeadAttention drawn({.model_dim = 12,
                                  .heads = 4,
                                  .kv_heads = 2,
                                  .head_dim = 5,
                                  .key_dim = 7,
                                  .value_dim = 6,
                                  .bias = true,
                                  .dtype = DType::f64,
                                  .initializer = Initializer::torch_linear,
                                  .seed = 9});
  EXPECT_EQ(stored.config(), drawn.config());
  for (const auto& [name, parameter] : drawn.parameters()) {
    EXPECT_TRUE(same_bits(stored.parameter(name), parameter)) << name;
  }
}

TEST_F(LayerCommand, layer_equals_infer) {
  const MultiHeadAttention layer({.model_dim = 8, .heads = 2, .bias = true, .seed = 3});
  layer.save(file("layer.safetensors"));
  const Tensor x = save_random("x.npy", {2, 5, 8}, 1);
  const Finished finished = run({"layer", "layer.safetensors", "x.npy", "-o", "y.npy", "--causal", "--weights", "w.npy",
                                 "--lse", "lse.npy", "--engine", "reference"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.out.find("y.npy  (2, 5, 8) f32  reference engine  "), 0u) << finished.out;
  Tensor weights({2, 2, 5, 5}), lse({2, 2, 5});
  const Tensor y =
      layer.infer(x, x, x, {.causal = Causal::square, .engine = Engine::reference}, {.lse = lse, .weights = weights});
  EXPECT_TRUE(same_bits(load_npy(file("y.npy")), y));
  EXPECT_TRUE(same_bits(load_npy(file("w.npy")), weights));
  EXPECT_TRUE(same_bits(load_npy(file("lse.npy")), lse));
}

TEST_F(LayerCommand, keys_stand_in_for_values_that_are_not_given) {
  const MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  layer.save(file("layer.safetensors"));
  const Tensor x = save_random("x.npy", {3, 8}, 1);
  const Tensor memory = save_random("memory.npy", {4, 8}, 2);
  const Tensor values = save_random("values.npy", {4, 8}, 3);
  ASSERT_EQ(run({"layer", "layer.safetensors", "x.npy", "--keys", "memory.npy", "-o", "a.npy"}).code, 0);
  EXPECT_TRUE(same_bits(load_npy(file("a.npy")), layer.infer(x, memory, memory)));
  ASSERT_EQ(run({"layer", "layer.safetensors", "x.npy", "--keys", "memory.npy", "--values", "values.npy", "-o", "b.npy",
                 "--valid-lens", "1,2,4", "--weights", "w.npy"})
                .code,
            0);
  const Tensor lens = Tensor::of<std::int64_t>({1, 3}, {1, 2, 4});
  EXPECT_TRUE(same_bits(load_npy(file("b.npy")), layer.infer(x, memory, values, {.valid_lens = lens})));
  EXPECT_EQ(load_npy(file("w.npy")).sizes(), (Dims{2, 3, 4}));
}

TEST_F(LayerCommand, a_newcomer_gets_from_nothing_to_a_result) {
  ASSERT_EQ(run({"layer-init", "--model-dim", "16", "--heads", "4", "--dtype", "bf16", "-o", "l.safetensors"}).code, 0);
  ASSERT_EQ(run({"random", "2,5,16", "--dtype", "bf16", "-o", "x.safetensors"}).code, 0);
  const Finished finished = run({"layer", "l.safetensors", "x.safetensors:out", "-o", "y.safetensors"});
  ASSERT_EQ(finished.code, 0) << finished.err;
  const NamedTensors stored = load_safetensors(file("y.safetensors")).tensors;
  EXPECT_EQ(stored.at("out").sizes(), (Dims{2, 5, 16}));
  EXPECT_EQ(stored.at("out").dtype(), DType::bf16);
}

TEST_F(LayerCommand, random_draws_the_same_numbers_for_the_same_seed) {
  ASSERT_EQ(run({"random", "3,4", "-o", "a.npy", "--seed", "5", "--dtype", "f64"}).code, 0);
  ASSERT_EQ(run({"random", "3,4", "-o", "b.npy", "--seed", "5", "--dtype", "f64"}).code, 0);
  ASSERT_EQ(run({"random", "3,4", "-o", "c.npy", "--seed", "6", "--dtype", "f64"}).code, 0);
  EXPECT_TRUE(same_bits(load_npy(file("a.npy")), load_npy(file("b.npy"))));
  EXPECT_FALSE(same_bits(load_npy(file("a.npy")), load_npy(file("c.npy"))));
}

TEST_F(LayerCommand, what_makes_no_layer_is_refused) {
  const Arguments init = {"layer-init", "--heads", "4", "-o", "layer.safetensors", "--model-dim"};
  const auto with = [&](const Arguments& more) {
    Arguments arguments = init;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  expect_failure(with({"10"}), 2, "headway layer-init", "model_dim 10 is not divisible by heads 4");
  expect_failure(with({"8", "--initializer", "zeros"}), 2, "headway layer-init",
                 "--initializer: expected xavier_uniform");
  expect_failure(run({"layer-init", "--model-dim", "8", "--heads", "2", "-o", "layer.npy"}), 2, "headway layer-init",
                 ".safetensors");
  EXPECT_TRUE(files().empty());
}

TEST_F(LayerCommand, a_layer_and_arrays_that_do_not_fit_are_refused) {
  MultiHeadAttention({.model_dim = 8, .heads = 2}).save(file("layer.safetensors"));
  save_random("x.npy", {2, 5, 6}, 1);
  save_random("vector.npy", {8}, 1);
  save_random("double.npy", {2, 5, 8}, 1, DType::f64);
  expect_failure(run({"layer", "layer.safetensors", "x.npy", "-o", "y.npy"}), 2, "headway layer", "model_dim 8");
  expect_failure(run({"layer", "layer.safetensors", "vector.npy", "-o", "y.npy", "--weights", "w.npy"}), 2,
                 "headway layer", "queries");
  expect_failure(run({"layer", "layer.safetensors", "double.npy", "-o", "y.npy"}), 2, "headway layer", "f64");
  expect_failure(run({"layer", "x.npy", "x.npy", "-o", "y.npy"}), 1, "headway layer", "x.npy");
  expect_failure(run({"layer", "layer.safetensors", "x.npy", "-o", "layer.safetensors", "--force"}), 2, "headway layer",
                 "-o would overwrite an input file");
}

}  // namespace
}  // namespace headway::test
