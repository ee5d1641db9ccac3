// Document 003: MultiHeadAttention(num_hiddens, num_heads, dropout, bias) in NumPy, with valid_lens.
//
// The document's printed numbers came from np.random without a seed, so no one can draw them again. What can be checked
// is the computation: the same formula in plain loops on the same parameters. Two things that the document's code
// cannot do work here: valid_lens = None (its softmax is indented into the `if`, so attention_weights does not exist
// without a mask) and dropout (it takes the rate and never uses it).
#include "support.h"

using namespace headway;

// np.array([...]) of lengths
Tensor lengths(const std::vector<std::int64_t>& values) {
  return Tensor::of<std::int64_t>({static_cast<std::int64_t>(values.size())}, values);
}

void check_range(example::Report& report, const Tensor& output) {
  // Document 003's output[0][0] runs from 1088.5 to 1455.6: sums of 100 products of numbers near 25 and 0.5.
  const std::vector<double> row = example::numbers(output.view().select(0, 0).select(0, 0));
  const auto [lowest, highest] = std::minmax_element(row.begin(), row.end());
  std::cout << "output[0][0] runs from " << *lowest << " to " << *highest
            << "; in the document's run, with other draws, from 1088.52 to 1455.58\n";
  report.truth("  the same order of magnitude", *lowest > 900 && *highest < 1700);
}

// The mean of many dropout draws must come near the output without dropout; each draw must repeat for its seed.
void check_dropout(example::Report& report, const MultiHeadAttention& layer, const Tensor& X, const Tensor& Y,
                   const AttentionOptions& options, const Tensor& output) {
  const auto trained = [&](std::uint64_t seed) {
    AttentionOptions with_dropout = options;
    with_dropout.dropout = 0.5;
    with_dropout.seed = seed;
    return layer.infer(X, Y, Y, with_dropout);
  };
  report.truth("dropout 0.5: the same seed gives the same output",
               example::numbers(trained(1)) == example::numbers(trained(1)));
  report.truth("             another seed gives another output",
               example::numbers(trained(1)) != example::numbers(trained(2)));
  const int draws = 300;
  Tensor mean(output.sizes(), DType::f64);
  for (int seed = 0; seed < draws; ++seed) {
    const std::vector<double> draw = example::numbers(trained(static_cast<std::uint64_t>(seed)));
    for (std::size_t e = 0; e < draw.size(); ++e) {
      mean.as<double>()[e] += draw[e] / draws;
    }
  }
  report.values("             mean of 300 seeds against no dropout", mean, output, 0.15);
}

int main(int argc, char** argv) {
  example::Report report("Document 003: multi-head attention with valid_lens", argc, argv);
  const std::int64_t num_hiddens = 100, num_heads = 5;
  MultiHeadAttention attention({.model_dim = num_hiddens,
                                .heads = num_heads,
                                .dtype = DType::f64,
                                .initializer = Initializer::uniform_01,  // np.random.rand
                                .seed = 3});
  const std::int64_t batch_size = 2, num_queries = 4, num_kvpairs = 6;
  const std::vector<std::int64_t> valid = {3, 2};
  const Tensor valid_lens = lengths(valid);
  std::cout << "valid_lens " << valid_lens.view() << '\n';

  const Tensor X = example::rand({batch_size, num_queries, num_hiddens}, DType::f64, 1);
  const Tensor Y = example::rand({batch_size, num_kvpairs, num_hiddens}, DType::f64, 2);
  report.shape("Query data shape:", X.sizes(), {2, 4, 100});
  report.shape("Key-value data shape:", Y.sizes(), {2, 6, 100});

  const Tensor output = attention.forward(X, Y, Y, {.valid_lens = valid_lens});
  report.shape("Output shape:", output.sizes(), {2, 4, 100});
  report.values("against the document's formula in plain loops", output,
                example::layer_by_hand(attention, X, Y, Y, valid), 1e-12);
  check_range(report, output);

  report.say("\nwhat the document's code cannot do");
  report.values("valid_lens None", attention.infer(X, Y, Y), example::layer_by_hand(attention, X, Y, Y), 1e-12);
  const Tensor by_row = Tensor::of<std::int64_t>({2, 4}, {3, 3, 3, 3, 2, 2, 2, 2});
  report.values("valid_lens for each query, (batch, queries)", attention.infer(X, Y, Y, {.valid_lens = by_row}), output,
                0.0);
  check_dropout(report, attention, X, Y, {.valid_lens = valid_lens}, output);

  const Gradients gradients = attention.backward(output);
  report.shape("backward: W_q", gradients.parameters.at("W_q").sizes(), {100, 100});
  report.truth("          keys past valid_lens have no gradient",
               gradients.keys.at<double>({0, 3, 0}) == 0.0 && gradients.keys.at<double>({1, 2, 0}) == 0.0);

  report.say("");
  const MultiHeadAttention large({.model_dim = 512, .heads = 8, .dtype = DType::f64});
  const Tensor tokens = example::rand({1, 1024, 512}, DType::f64, 6), all = lengths({1024});
  report.headline(
      output.sizes(), [&] { attention.infer(X, Y, Y, {.valid_lens = valid_lens}); },
      [&] { large.infer(tokens, tokens, tokens, {.valid_lens = all}); });
  report.time("plain loops", example::milliseconds([&] { example::layer_by_hand(attention, X, Y, Y, valid); }));
  return report.result();
}
