// Sequences of several lengths in one pack: no padding, and none sees another.
#include <headway/headway.h>

#include <cmath>
#include <iostream>
#include <vector>

using namespace headway;

int main() {
  const std::vector<int> lengths = {3, 120, 17};
  const Tensor ends = cu_seqlens(lengths);  // 0, 3, 123, 140
  const std::int64_t total = ends.at<std::int64_t>({3}), heads = 2, head_dim = 32;

  Tensor x({total, heads, head_dim});
  for (std::int64_t row = 0; row < total; ++row) {  // each token holds the number of its sequence
    const float sequence = row < 3 ? 0.0f : row < 123 ? 1.0f : 2.0f;
    for (std::int64_t e = 0; e < heads * head_dim; ++e) x.as<float>()[row * heads * head_dim + e] = sequence;
  }

  const AttentionOptions options{.causal = Causal::square};
  std::cout << explain_varlen(x, x, x, ends, ends, options);
  const Tensor out = attention_varlen(x, x, x, ends, ends, options);
  std::cout << "the last token of each: " << out.at<float>({2, 0, 0}) << " " << out.at<float>({122, 0, 0}) << " "
            << out.at<float>({139, 0, 0}) << "\n";
  return std::abs(out.at<float>({122, 0, 0}) - 1) < 1e-6 && std::abs(out.at<float>({139, 0, 0}) - 2) < 1e-6 ? 0 : 1;
}
