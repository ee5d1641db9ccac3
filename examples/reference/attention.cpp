#include "examples.h"

using namespace headway;

namespace {

void example_attention() {
  const Tensor query({2, 8, 16, 64}), key({2, 2, 16, 64}), value({2, 2, 16, 32});  // 8 query heads share 2 key heads
  Tensor out({2, 8, 16, 32}), lse({2, 8, 16});
  attention(query, key, value, out, {.causal = Causal::square, .window = Window{.left = 4}}, {.lse = lse});
  std::cout << out.sizes() << ' ' << lse.sizes() << '\n';  // (2, 8, 16, 32) (2, 8, 16)
  const Tensor allocated = attention(query, key, value, {.causal = Causal::square});
  std::cout << allocated.sizes() << '\n';  // (2, 8, 16, 32)
}

void example_attention_backward() {
  const Tensor x = Tensor::of<double>({2, 2}, {1, 0, 0, 1});
  Tensor out({2, 2}, DType::f64), lse({2}, DType::f64);
  attention(x, x, x, out, {}, {.lse = lse});

  // The gradients of the sum of out: each of its numbers counts once.
  const Tensor grad_out = Tensor::of<double>({2, 2}, {1, 1, 1, 1});
  Tensor dv({2, 2}, DType::f64);
  attention_backward(grad_out, x, x, x, out, lse, {.dv = dv});
  std::cout << dv.sizes() << '\n';                                     // (2, 2)
  std::cout << dv.at<double>({0, 0}) + dv.at<double>({1, 0}) << '\n';  // 2
}

void example_attention_varlen() {
  // Two sequences of 3 and 5 tokens, one after the other; they never see each other.
  const Tensor packed({8, 4, 16});
  const Tensor starts = Tensor::of<std::int32_t>({3}, {0, 3, 8});
  Tensor out({8, 4, 16});
  attention_varlen(packed, packed, packed, starts, starts, out, {.causal = Causal::square});
  std::cout << out.sizes() << '\n';  // (8, 4, 16)
}

void example_cu_seqlens() {
  const Tensor starts = cu_seqlens(std::vector<int>{3, 0, 5});
  std::cout << starts.view() << '\n';  // [0 3 3 8]
  const Tensor packed({8, 4, 16});
  std::cout << attention_varlen(packed, packed, packed, starts, starts).sizes() << '\n';  // (8, 4, 16)
}

void example_attention_varlen_backward() {
  const Tensor packed({8, 4, 16}), grad_out({8, 4, 16});
  const Tensor starts = Tensor::of<std::int32_t>({3}, {0, 3, 8});
  Tensor out({8, 4, 16}), lse({4, 8}), dq({8, 4, 16}), dk({8, 4, 16}), dv({8, 4, 16});
  attention_varlen(packed, packed, packed, starts, starts, out, {}, {.lse = lse});
  attention_varlen_backward(grad_out, packed, packed, packed, out, lse, starts, starts, {.dq = dq, .dk = dk, .dv = dv});
  std::cout << dk.sizes() << '\n';  // (8, 4, 16)
}

void example_attention_scores() {
  const Tensor x = Tensor::of<float>({2, 1}, {1, 2});
  Tensor scores({2, 2});
  attention_scores(x, x, scores, Stage::scaled);
  std::cout << scores.at<float>({0, 1}) << ' ' << scores.at<float>({1, 1}) << '\n';  // 2 4
  attention_scores(x, x, scores, Stage::weights, {.causal = Causal::square});
  std::cout << scores.at<float>({0, 0}) << ' ' << scores.at<float>({0, 1}) << '\n';  // 1 0
}

void example_explain_varlen() {
  const Tensor packed({8, 4, 16}), starts = cu_seqlens({3, 5});
  const Plan plan = explain_varlen(packed, packed, packed, starts, starts);
  std::cout << plan.operation << ", " << plan.pairs << " pairs\n";  // attention_varlen, 136 pairs
}

void example_explain() {
  const Tensor x({1, 8, 128, 64});
  const Plan plan = explain(x, x, x, {.causal = Causal::square, .engine = Engine::reference});
  std::cout << plan.engine << ", " << plan.pairs << " pairs\n";  // reference, 66048 pairs
  const Plan backward = explain(x, x, x, {}, {.backward = true});
  std::cout << backward.operation << '\n';  // attention_backward
}

}  // namespace

void attention_examples() {
  example_attention();
  example_attention_backward();
  example_attention_varlen();
  example_cu_seqlens();
  example_attention_varlen_backward();
  example_attention_scores();
  example_explain_varlen();
  example_explain();
}
