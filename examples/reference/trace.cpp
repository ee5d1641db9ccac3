#include "examples.h"

using namespace headway;

namespace {

void example_trace() {
  const Tensor x = Tensor::of<double>({2, 2}, {1, 0, 0, 1});
  const Trace steps = trace(x, x, x, {.causal = Causal::square}, {.key_tokens = {"dogs", "bark"}});
  std::cout << steps.step("scaled scores").formula << '\n';  // S[i,j] = S[i,j] / sqrt(2)
  std::cout << steps.result().sizes() << '\n';               // (2, 2)

  const MultiHeadAttention layer({.model_dim = 4, .heads = 2});
  const Tensor tokens({3, 4});
  std::cout << trace(layer, tokens, tokens, tokens).step("joined heads").numbers.sizes() << '\n';  // (3, 4)
}

void example_TracePart() {
  std::cout << name(TracePart::other_row) << ' ' << name(TraceKind::product) << '\n';  // other_row product
}

void example_to_string() {
  const Tensor x = Tensor::of<double>({2, 1}, {1, 2});
  const Trace steps = trace(x, x, x);
  const std::string one = to_string(steps, 3);          // the fourth step alone; to_string(steps) has all
  std::cout << one.substr(0, one.find("  (")) << '\n';  //  4  scores
  std::cout << (to_string(steps, {.width = 60}).size() > one.size()) << '\n';  // true
}

void example_write_trace() {
  const Tensor x = Tensor::of<double>({2, 2}, {1, 0, 0, 1});
  const Trace steps = trace(x, x, x);
  write_trace("trace.html", steps);                      // to open in a browser
  std::cout << trace_page(steps).substr(0, 15) << '\n';  // <!doctype html>
}

}  // namespace

void trace_examples() {
  example_trace();
  example_TracePart();
  example_to_string();
  example_write_trace();
}
