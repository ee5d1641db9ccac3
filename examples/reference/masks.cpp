#include "examples.h"

using namespace headway;

namespace {

void example_MaskSpans() {
  const Tensor keep = Tensor::of<bool>({2, 2}, {true, false, true, true});
  const MaskSpans found = masks::blocks(keep, 64).spans(128, 128);
  std::cout << found.spans.sizes() << " for " << found.rows << " rows each\n";  // (1, 1, 2, 1, 2) for 64 rows each
  const Tensor x({1, 1, 128, 16});
  const Tensor out = attention(x, x, x, {.spans = found.spans, .span_rows = found.rows});
}

void example_MaskParts() {
  const Tensor bools = Tensor::of<bool>({2, 2}, {true, true, false, true});
  const MaskParts parts = (masks::dense(bools) & masks::causal()).parts(2, 2);
  std::cout << parts.spans->spans.sizes() << ' ' << parts.bools->sizes() << '\n';  // (1, 1, 2, 1, 2) (1, 1, 2, 2)
  const Tensor starts = cu_seqlens({3, 4});  // inside of each of two packed sequences
  std::cout << masks::causal().parts(starts, starts).spans->spans.sizes() << '\n';  // (1, 1, 7, 1, 2)
}

void example_Mask() {
  const Mask mask = masks::prefix({2, 0}) & masks::window(2, {});
  std::cout << mask.batch() << ' ' << mask.heads() << ' ' << mask.pairs(4, 4) << '\n';  // 2 1 19
  std::cout << mask.to_bool(4, 4).sizes() << '\n';                                      // (2, 1, 4, 4)
  std::cout << mask.spans(4, 4).spans.sizes() << '\n';                                  // (2, 1, 4, 1, 2)
  std::cout << masks::window(1, 0).draw(3, 3) << '\n';
  // window(1, 0): 3 queries x 3 keys, 5 pairs, 55.6 %
  // ■ · ·
  // ■ ■ ·
  // · ■ ■
  const bool is_shared = Mask(mask).node() == mask.node();  // copies share their parts
  std::cout << is_shared << '\n';                           // true
}

void example_to_string() {
  std::cout << to_string((masks::first(4) | masks::window(128, {})) & masks::causal()) << '\n';
  // (first(4) | window(128, None)) & causal()
}

void example_MaskOption() {
  const Tensor x({1, 2, 6, 16});
  const Tensor bools({6, 6}, DType::b8);
  attention(x, x, x, {.mask = bools});                                                   // a view, as ever
  attention(x, x, x, {.mask = masks::documents({0, 0, 0, 1, 1, 1}) & masks::causal()});  // or a structured mask
}

void example_Integers() {
  const std::vector<int> ids = {0, 0, 1};
  std::cout << masks::documents(ids).pairs(3, 3) << '\n';                                     // 5
  std::cout << masks::documents(Tensor({2, 3}, DType::i32)).pairs(3, 3) << '\n';              // 18
  std::cout << masks::Integers(7).sizes() << ' ' << masks::Integers(7).numbers()[0] << '\n';  // () 7
}

void example_causal() { std::cout << masks::causal().pairs(4, 6) << '\n'; }  // 18

void example_window() { std::cout << masks::window(1, {}).pairs(4, 4) << '\n'; }  // 13

void example_first() { std::cout << masks::first(2).pairs(4, 4) << '\n'; }  // 8

void example_prefix() { std::cout << masks::prefix(3).pairs(4, 4) << '\n'; }  // 13

void example_documents() {
  std::cout << masks::documents({0, 0, 5, 0, -1}) << '\n';
  // documents(5 ids): 5 queries x 5 keys, 10 pairs, 40 %
  // ■ ■ · ■ ·
  // ■ ■ · ■ ·
  // · · ■ · ·
  // ■ ■ · ■ ·
  // · · · · ·
}

void example_documents_of() { std::cout << masks::documents_of({2, 3}).pairs(6, 6) << '\n'; }  // 13

void example_blocks() {
  const Tensor keep = Tensor::of<bool>({2, 2}, {true, false, true, true});
  std::cout << masks::blocks(keep, 4).pairs(8, 8) << ' ' << masks::blocks(keep, 2, 3).pairs(4, 6) << '\n';  // 48 18
}

void example_tree() {
  std::cout << masks::tree({-1, 0, 0, 1}).draw(4, 5) << '\n';
  // tree(4 tokens): 4 queries x 5 keys, 12 pairs, 60 %
  // ■ ■ · · ·
  // ■ ■ ■ · ·
  // ■ ■ · ■ ·
  // ■ ■ ■ · ■
}

void example_spans() {
  const Tensor array = Tensor::of<std::int32_t>({2, 1, 2}, {0, 2, 1, 4});  // two entries of one span
  std::cout << masks::spans(array, 3).pairs(6, 4) << '\n';                 // 15
}

void example_dense() {
  const Tensor bools = Tensor::of<bool>({2, 2}, {true, true, false, true});
  std::cout << (masks::dense(bools) & masks::causal()).pairs(2, 2) << '\n';  // 2
}

void example_from_bool() {
  const Tensor bools = masks::causal().to_bool(64, 64);
  std::cout << masks::from_bool(bools).spans(64, 64).spans.sizes() << '\n';  // (1, 1, 64, 1, 2)
}

}  // namespace

void masks_examples() {
  example_MaskSpans();
  example_MaskParts();
  example_Mask();
  example_to_string();
  example_MaskOption();
  example_Integers();
  example_causal();
  example_window();
  example_first();
  example_prefix();
  example_documents();
  example_documents_of();
  example_blocks();
  example_tree();
  example_spans();
  example_dense();
  example_from_bool();
}
