#include "examples.h"

using namespace headway;

namespace {

void example_analyze() {
  const Tensor query({1, 2, 100, 16}), key({1, 2, 100, 16});  // zeros: every key that a row sees gets the same weight
  const Analysis found = analyze(query, key, {.causal = Causal::square}, {.top = 3});
  std::cout << found.entropy.sizes() << ' ' << found.top_keys.sizes() << '\n';  // (1, 2, 100) (1, 2, 100, 3)
  std::cout << found.first.at<float>({0, 0, 3}) << '\n';                        // 0.25
}

void example_mean_over_rows() {
  const Tensor x({1, 1, 4, 8});
  const Analysis found = analyze(x, x);                       // each of 4 rows gives each of 4 keys a quarter
  std::cout << mean_over_rows(found.diagonal, 0, 0) << '\n';  // 0.25
}

void example_weights_in() {
  const Tensor query({1, 2, 1000, 16}), key({1, 2, 1000, 16});
  const Analysis found = analyze(query, key);
  const Tensor part =
      weights_in(query, key, {.row_begin = 500, .row_end = 502, .key_begin = 0, .key_end = 3}, {}, found.lse);
  std::cout << part.sizes() << ' ' << part.at<float>({0, 0, 0, 0}) << '\n';  // (1, 2, 2, 3) 0.001
}

void example_tile_map() {
  const Tensor x({1, 1, 1000, 16});
  const Analysis found = analyze(x, x);
  const TileMap map = tile_map(x, x, found.lse, 0, 0, {.row_end = 1000, .key_end = 1000}, 250, 500);
  std::cout << map.mean.sizes() << ' ' << map.mean.at<float>({0, 0}) << '\n';  // (4, 2) 0.001
}

void example_mean_weights() {
  const Tensor query({1, 8, 4, 16}), key({1, 8, 4, 16}), value({1, 8, 4, 16});
  Tensor out({1, 8, 4, 16}), lse({1, 8, 4}), mean({1, 4, 4});
  attention(query, key, value, out, {}, {.lse = lse});
  mean_weights(query, key, lse, mean);
  std::cout << mean.at<float>({0, 0, 0}) << '\n';  // 0.25
}

}  // namespace

void analysis_examples() {
  example_analyze();
  example_mean_over_rows();
  example_weights_in();
  example_tile_map();
  example_mean_weights();
}
