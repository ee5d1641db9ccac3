// Document 000: multi_head_attention(Q, K, V, n_heads) on (batch, seq, d_model), without projections.
//
// The document splits heads with reshape and transpose, multiplies, and joins the heads again. Here split_heads makes a
// view: attention reads Q, K and V, and writes its output, where they lie. Nothing is copied and no (seq, seq) matrix
// is stored, so space is O(batch heads seq) where the document needs O(batch heads seq^2).
#include "support.h"

using namespace headway;

// (batch, seq, d_model) -> (batch, heads, seq, d_k): the same memory, other strides.
template <class View>
View split_heads(View x, std::int64_t n_heads) {
  const std::int64_t d_k = x.size(2) / n_heads;
  return x.unflatten(2, {n_heads, d_k}).transpose(1, 2);
}

Tensor multi_head_attention(const Tensor& Q, const Tensor& K, const Tensor& V, std::int64_t n_heads) {
  Tensor output(Q.sizes(), Q.dtype());
  // Writing through the split view puts the heads side by side: the "concatenate heads" step is where the output goes.
  attention(split_heads(Q.view(), n_heads), split_heads(K.view(), n_heads), split_heads(V.view(), n_heads),
            split_heads(output.view(), n_heads));
  return output;
}

int main(int argc, char** argv) {
  example::Report report("Document 000: multi-head attention from scratch, on views", argc, argv);
  const std::int64_t batch_size = 2, seq_len = 64, d_model = 64, n_heads = 8;
  const Tensor Q = example::randn({batch_size, seq_len, d_model}, DType::f64, 1);
  const Tensor K = example::randn({batch_size, seq_len, d_model}, DType::f64, 2);
  const Tensor V = example::randn({batch_size, seq_len, d_model}, DType::f64, 3);

  const Tensor output = multi_head_attention(Q, K, V, n_heads);
  report.shape("output shape", output.sizes(), {batch_size, seq_len, d_model});
  report.values("against the document's steps in plain loops", output, example::attention_by_hand(Q, K, V, n_heads),
                1e-13);

  // The document reshapes K and V with the length of Q, so it cannot take another one. Here it may differ.
  const Tensor longer_K = example::randn({batch_size, 100, d_model}, DType::f64, 4);
  const Tensor longer_V = example::randn({batch_size, 100, d_model}, DType::f64, 5);
  const Tensor cross = multi_head_attention(Q, longer_K, longer_V, n_heads);
  report.shape("with 100 keys and values (the document's code fails here)", cross.sizes(), Q.sizes());
  report.values("against plain loops", cross, example::attention_by_hand(Q, longer_K, longer_V, n_heads), 1e-13);

  // Large scores are why the document subtracts the maximum; exp(1000) alone would overflow.
  Tensor large_Q = Q.clone();
  for (std::int64_t e = 0; e < large_Q.elements(); ++e) {
    large_Q.as<double>()[e] *= 1000;
  }
  report.values("with scores in the thousands", multi_head_attention(large_Q, K, V, n_heads),
                example::attention_by_hand(large_Q, K, V, n_heads), 1e-11);

  // The document asserts that the heads divide d_model; here the error says which numbers do not fit.
  try {
    multi_head_attention(Q, K, V, 7);
    report.truth("7 heads are refused", false);
  } catch (const InvalidArgument& error) {
    report.truth(std::string("7 heads are refused: \"") + error.what() + '"', true);
  }

  report.say("");
  const Tensor large = example::randn({1, 1024, 512}, DType::f64, 6);
  report.headline(
      output.sizes(), [&] { multi_head_attention(Q, K, V, n_heads); },
      [&] { multi_head_attention(large, large, large, n_heads); });
  report.time("plain loops", example::milliseconds([&] { example::attention_by_hand(Q, K, V, n_heads); }));
  report.say("\nwhat ran, and why");
  report.say(to_string(
      explain(split_heads(Q.view(), n_heads), split_heads(K.view(), n_heads), split_heads(V.view(), n_heads))));
  return report.result();
}
