#include "examples.h"

using namespace headway;

namespace {

// 3 pages of 2 slots with one head. The first sequence has 3 keys, in pages 2 and 0; the second has 1, in page 1.
void example_PagedKeys() {
  Tensor key_pages({3, 2, 1, 4}), value_pages({3, 2, 1, 4});
  const Tensor table = Tensor::of<std::int32_t>({2, 2}, {2, 0, 1, -1});  // -1: never read
  const Tensor lengths = Tensor::of<std::int32_t>({2}, {3, 1});
  const PagedKeys keys{.key_pages = key_pages, .value_pages = value_pages, .block_table = table, .lengths = lengths};
  std::cout << keys.key_pages.sizes() << '\n';  // (3, 2, 1, 4)
}

void example_attention_paged() {
  Tensor key_pages({3, 2, 1, 4}), value_pages({3, 2, 1, 1});
  value_pages.at<float>({2, 0, 0, 0}) = 3;  // the first key's value
  const Tensor table = Tensor::of<std::int32_t>({1, 2}, {2, 0});
  const Tensor lengths = Tensor::of<std::int32_t>({1}, {3});
  const Tensor query({1, 1, 1, 4});  // one head's next token
  const Tensor out = attention_paged(query, {key_pages, value_pages, table, lengths});
  std::cout << out.at<float>({0, 0, 0, 0}) << '\n';  // 1
}

void example_explain_paged() {
  const Tensor pages({8, 16, 2, 64}), table = Tensor::of<std::int32_t>({1, 3}, {5, 0, 7});
  const Tensor lengths = Tensor::of<std::int32_t>({1}, {40});
  const Plan plan = explain_paged(Tensor({1, 8, 1, 64}), {pages, pages, table, lengths});
  std::cout << plan.options << '\n';  // causal bottom_right, pages of 16, scale 0.125
}

}  // namespace

void serving_examples() {
  example_PagedKeys();
  example_attention_paged();
  example_explain_paged();
}
