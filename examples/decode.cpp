// Decoding: one query at a time over keys and values that grow, and the same result as all queries at once.
#include <headway/headway.h>

#include <cmath>
#include <cstdio>
#include <random>

using namespace headway;

int main() {
  const std::int64_t heads = 4, most = 64, head_dim = 16;
  std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  Tensor q({1, heads, most, head_dim}), keys(q.sizes()), values(q.sizes());
  for (Tensor* tensor : {&q, &keys, &values}) {
    for (std::int64_t e = 0; e < tensor->elements(); ++e) tensor->as<float>()[e] = normal(generator);
  }

  const Tensor at_once = attention(q, keys, values, {.causal = Causal::bottom_right});
  double largest = 0;
  for (std::int64_t step = 0; step < most; ++step) {
    // The cache has room for all tokens; a slice of it holds those so far. Nothing is copied.
    const ConstTensorView k = keys.view().slice(2, 0, step + 1), v = values.view().slice(2, 0, step + 1);
    const Tensor out = attention(q.view().slice(2, step, step + 1), k, v);
    largest = std::max<double>(largest, std::abs(out.at<float>({0, 1, 0, 2}) - at_once.at<float>({0, 1, step, 2})));
  }
  std::printf("%lld tokens decoded, at most %.1e from all at once\n", static_cast<long long>(most), largest);
  return largest < 1e-5 ? 0 : 1;
}
