// Attention over std::vectors, with a mask of your own.
#include <headway/headway.h>

#include <cstdio>
#include <vector>

using namespace headway;

int main() {
  const std::size_t batch = 2, heads = 4, tokens = 6, head_dim = 8;
  const std::vector<float> q(batch * heads * tokens * head_dim, 0.1f), k = q;
  std::vector<float> v(q.size());
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / head_dim % tokens);  // its own position

  // 1 may be seen, 0 may not: here each token sees those at even positions.
  std::vector<unsigned char> mask(tokens * tokens);
  for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = i % tokens % 2 == 0;

  const Dims shape{batch, heads, tokens, head_dim};
  const Tensor out = attention(ConstTensorView(q, shape), ConstTensorView(k, shape), ConstTensorView(v, shape),
                               {.mask = ConstTensorView(mask, {tokens, tokens})});
  std::printf("the mean of positions 0, 2 and 4: %g\n", out.at<float>({0, 0, 0, 0}));
  return out.at<float>({0, 0, 0, 0}) == 2.0f ? 0 : 1;
}
