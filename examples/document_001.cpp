// Document 001: a layer with W_q, W_k, W_v, W_o as nn.Linear, forward(Q, K, V), self- and cross-attention.
//
// nn.Linear stores its weight as (out, in) and computes x W^T + b; here a weight is (in, out) and y = x W + b, as in
// the formula. Both draw from the same distribution, U(-1/sqrt(in), 1/sqrt(in)), from different generators: the
// document's values depend on torch's, so the values here are compared with the document's steps in plain loops.
#include "support.h"

using namespace headway;

int main(int argc, char** argv) {
  example::Report report("Document 001: the multi-head attention layer", argc, argv);
  const std::int64_t d_model = 32, num_heads = 4;
  MultiHeadAttention mha(
      {.model_dim = d_model, .heads = num_heads, .bias = true, .initializer = Initializer::torch_linear, .seed = 0});

  // The document's own debugging lines.
  report.shape("W_q weight shape:", mha.parameter("W_q").sizes(), {32, 32});
  const Tensor x = example::randn({2, 6, d_model}, DType::f32, 1);
  const Tensor out = mha.forward(x, x, x);
  report.shape("Output shape:", out.sizes(), {2, 6, 32});
  report.values("  against plain loops", out, example::layer_by_hand(mha, x, x, x), 1e-6);

  const Tensor Q = example::randn({1, 3, d_model}, DType::f32, 2);
  const Tensor K = example::randn({1, 7, d_model}, DType::f32, 3);
  const Tensor V = example::randn({1, 7, d_model}, DType::f32, 4);
  const Tensor out2 = mha.forward(Q, K, V);
  report.shape("Cross-attn shape:", out2.sizes(), {1, 3, 32});
  report.values("  against plain loops", out2, example::layer_by_hand(mha, Q, K, V), 1e-6);

  // Every parameter has a gradient: of sum(out2), so grad_output is all ones.
  Tensor ones(out2.sizes());
  std::fill_n(ones.as<float>(), ones.elements(), 1.0f);
  const Gradients gradients = mha.backward(ones);
  report.say("\ngradients of sum(out2)");
  for (const auto& [name, parameter] : mha.parameters()) {
    report.shape("  " + name, gradients.parameters.at(name).sizes(), parameter.sizes());
  }
  // b_o is added once to each of the three output rows.
  Tensor three({d_model});
  std::fill_n(three.as<float>(), d_model, 3.0f);
  report.values("  b_o is 3 everywhere", gradients.parameters.at("b_o"), three, 0.0);

  report.say("");
  const MultiHeadAttention large({.model_dim = 512, .heads = 8, .bias = true});
  const Tensor tokens = example::randn({1, 1024, 512}, DType::f32, 6);
  report.headline(
      out.sizes(), [&] { mha.forward(x, x, x); }, [&] { large.infer(tokens, tokens, tokens); });
  const Tensor grad_output = example::randn({2, 6, d_model}, DType::f32, 5);
  report.time("backward", example::milliseconds([&] { mha.backward(grad_output); }));
  report.time("forward in plain loops", example::milliseconds([&] { example::layer_by_hand(mha, x, x, x); }));
  return report.result();
}
