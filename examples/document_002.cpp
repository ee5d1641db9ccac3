// Document 002: compute_qkv, self_attention and multi_head_attention on (seq_len, d_model).
//
// The document's example has two tokens and identity weights, so its result can be worked out by hand, and is below.
#include <tuple>

#include "support.h"

using namespace headway;

// X W for X (seq_len, d_model), W (d_model, d_model)
Tensor matmul(const Tensor& X, const Tensor& W) {
  Tensor result({X.size(0), W.size(1)}, X.dtype());
  for (std::int64_t i = 0; i < X.size(0); ++i) {
    for (std::int64_t j = 0; j < W.size(1); ++j) {
      for (std::int64_t e = 0; e < X.size(1); ++e) {
        result.at<double>({i, j}) += X.at<double>({i, e}) * W.at<double>({e, j});
      }
    }
  }
  return result;
}

std::tuple<Tensor, Tensor, Tensor> compute_qkv(const Tensor& X, const Tensor& W_q, const Tensor& W_k,
                                               const Tensor& W_v) {
  return {matmul(X, W_q), matmul(X, W_k), matmul(X, W_v)};
}

// One head: (seq_len, d_k) each.
Tensor self_attention(const Tensor& Q, const Tensor& K, const Tensor& V) {
  Tensor output({Q.size(0), V.size(1)}, Q.dtype());
  attention(Q, K, V, output);
  return output;
}

// (seq_len, d_model) -> (n_heads, seq_len, d_k), without a copy.
template <class View>
View split_heads(View x, std::int64_t n_heads) {
  return x.unflatten(1, {n_heads, x.size(1) / n_heads}).transpose(0, 1);
}

Tensor multi_head_attention(const Tensor& Q, const Tensor& K, const Tensor& V, std::int64_t n_heads) {
  Tensor output(Q.sizes(), Q.dtype());
  attention(split_heads(Q.view(), n_heads), split_heads(K.view(), n_heads), split_heads(V.view(), n_heads),
            split_heads(output.view(), n_heads));
  return output;
}

Tensor identity(std::int64_t size) {
  Tensor eye({size, size}, DType::f64);
  for (std::int64_t i = 0; i < size; ++i) {
    eye.at<double>({i, i}) = 1;
  }
  return eye;
}

// With two tokens a softmax is a sigmoid: token 1's weight in row i is 1 / (1 + exp(-(s(i,1) - s(i,0)))). With Q = K =
// V = X and heads of d_k columns, s(i,1) - s(i,0) = <x_i, x_1 - x_0> / sqrt(d_k), and x_1 - x_0 is 4 in every column:
//   d_k = 2, columns 1-2: row 0: 4 (1+2) / sqrt 2 = 12 / sqrt 2,  row 1: 4 (5+6) / sqrt 2 = 44 / sqrt 2
//            columns 3-4: row 0: 4 (3+4) / sqrt 2 = 28 / sqrt 2,  row 1: 4 (7+8) / sqrt 2 = 60 / sqrt 2
// so each output is x_0 + 4 / (1 + exp(-difference)).
Tensor expected_by_hand(const Tensor& X, std::int64_t n_heads) {
  const std::int64_t d_k = X.size(1) / n_heads;
  Tensor expected(X.sizes(), DType::f64);
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t column = 0; column < X.size(1); ++column) {
      double difference = 0;
      for (std::int64_t e = column / d_k * d_k; e < (column / d_k + 1) * d_k; ++e) {
        difference += 4 * X.at<double>({i, e}) / std::sqrt(static_cast<double>(d_k));
      }
      expected.at<double>({i, column}) = X.at<double>({0, column}) + 4 / (1 + std::exp(-difference));
    }
  }
  return expected;
}

int main(int argc, char** argv) {
  example::Report report("Document 002: compute_qkv, self_attention, multi_head_attention", argc, argv);
  // attention takes floating-point tensors; the document's integers become float64, as NumPy makes them in X @ W.
  const Tensor X = convert(Tensor::of<std::int64_t>({2, 4}, {1, 2, 3, 4, 5, 6, 7, 8}), DType::f64);
  const Tensor W_q = identity(4), W_k = identity(4), W_v = identity(4);

  const auto [Q, K, V] = compute_qkv(X, W_q, W_k, W_v);
  report.values("Q = X for identity weights", Q, X, 0.0);
  const Tensor result = multi_head_attention(Q, K, V, 2);
  report.shape("result.shape =", result.sizes(), {2, 4});

  const Tensor expected = expected_by_hand(X, 2);
  std::cout << std::setprecision(8) << "found\n" << result.view() << "\nby hand\n" << expected.view() << '\n';
  report.values("against the values by hand", result, expected, 1e-15);

  const Tensor single = self_attention(Q, K, V);
  report.shape("\nself_attention shape", single.sizes(), V.sizes());
  report.values("one head, by hand", single, expected_by_hand(X, 1), 1e-15);

  report.say("");
  const Tensor large = example::randn({1024, 512}, DType::f64, 6);
  report.headline(
      result.sizes(),
      [&] {
        const auto [q, k, v] = compute_qkv(X, W_q, W_k, W_v);
        multi_head_attention(q, k, v, 2);
      },
      [&] { multi_head_attention(large, large, large, 8); });
  return report.result();
}
