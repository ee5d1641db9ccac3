// Document 004: the Flax MultiHeadAttention of "Dive into Deep Learning", which also returns its attention weights.
//
// Its shape check feeds ones. Then all keys are equal, every visible key gets the same weight, and each output row is
// (1 W_v) W_o: values that need no random numbers to be known. The document reshapes heads into the batch,
// (batch*heads, queries, keys); here the weights are (batch, heads, queries, keys): the same numbers in the same order.
#include "support.h"

using namespace headway;

Tensor filled_with_ones(const Dims& sizes) {
  Tensor result(sizes);
  std::fill_n(result.as<float>(), result.elements(), 1.0f);
  return result;
}

// 1 / valid_len for the keys that may be seen, 0 for the others: (batch, heads, queries, keys)
Tensor expected_weights(const std::vector<std::int64_t>& valid, std::int64_t heads, std::int64_t queries,
                        std::int64_t keys) {
  const auto batch = static_cast<std::int64_t>(valid.size());
  Tensor weights({batch, heads, queries, keys}, DType::f64);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = valid[static_cast<std::size_t>(b)];
    for (std::int64_t row = 0; row < heads * queries; ++row) {
      for (std::int64_t j = 0; j < length; ++j) {
        weights.at<double>({b, row / queries, row % queries, j}) = 1.0 / static_cast<double>(length);
      }
    }
  }
  return weights;
}

int main(int argc, char** argv) {
  example::Report report("Document 004: heads in parallel, and their weights", argc, argv);
  const std::int64_t num_hiddens = 100, num_heads = 5;
  // nn.Dense draws a truncated normal; any draw will do for what is checked here.
  MultiHeadAttention attention({.model_dim = num_hiddens, .heads = num_heads, .seed = 4});
  const std::int64_t batch_size = 2, num_queries = 4, num_kvpairs = 6;
  const std::vector<std::int64_t> valid = {3, 2};
  const Tensor valid_lens = Tensor::of<std::int64_t>({2}, valid);
  const Tensor X = filled_with_ones({batch_size, num_queries, num_hiddens});
  const Tensor Y = filled_with_ones({batch_size, num_kvpairs, num_hiddens});

  Tensor weights({batch_size, num_heads, num_queries, num_kvpairs});
  const Tensor output = attention.forward(X, Y, Y, {.valid_lens = valid_lens}, {.weights = weights});
  report.shape("output shape", output.sizes(), {batch_size, num_queries, num_hiddens});
  report.values("weights are 1/3 and 1/2 on visible keys, 0 elsewhere", weights,
                expected_weights(valid, num_heads, num_queries, num_kvpairs), 1e-6);
  std::cout << "weights of batch item 0, head 0\n" << std::as_const(weights).view().select(0, 0).select(0, 0) << '\n';

  // Attention averages equal rows, so what is left are the two projections.
  const Tensor value = example::linear_by_hand(Y.view().slice(1, 0, num_queries), attention.parameter("W_v"));
  report.values("output rows are (1 W_v) W_o", output, example::linear_by_hand(value, attention.parameter("W_o")),
                1e-6);

  const Tensor per_query = Tensor::of<std::int64_t>({2, 4}, {3, 3, 3, 3, 2, 2, 2, 2});
  report.values("valid_lens (batch, queries)", attention.infer(X, Y, Y, {.valid_lens = per_query}), output, 0.0);

  // training=True: a dropped weight is 0, a kept one is doubled at rate 0.5.
  const AttentionOptions training{.valid_lens = valid_lens, .dropout = 0.5, .seed = 7};
  const Tensor trained = attention.infer(X, Y, Y, training);
  report.truth("training=True changes the output", example::numbers(trained) != example::numbers(output));
  report.truth("              and repeats for its seed",
               example::numbers(trained) == example::numbers(attention.infer(X, Y, Y, training)));

  report.say("");
  const MultiHeadAttention large({.model_dim = 512, .heads = 8});
  const Tensor tokens = example::randn({1, 1024, 512}, DType::f32, 6);
  Tensor large_weights({1, 8, 1024, 1024});
  report.headline(
      output.sizes(), [&] { attention.infer(X, Y, Y, {.valid_lens = valid_lens}, {.weights = weights}); },
      [&] { large.infer(tokens, tokens, tokens, {}, {.weights = large_weights}); });
  report.time("without weights", example::milliseconds([&] { attention.infer(X, Y, Y, {.valid_lens = valid_lens}); }));
  return report.result();
}
