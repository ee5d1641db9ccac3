#include "examples.h"

using namespace headway;

namespace {

void example_Error() {
  const Tensor query({1, 8, 4, 64}), key({1, 8, 4, 80}), value({1, 8, 4, 64});
  Tensor out({1, 8, 4, 64});
  try {
    attention(query, key, value, out);
  } catch (const InvalidArgument& error) {
    std::cout << error.what() << '\n';  // attention: key has head_dim 80, query has 64
  }
  try {
    attention(query, query, value, out, {.progress = [](double) { return false; }});
  } catch (const Cancelled&) {
    std::cout << "stopped\n";  // stopped
  }
}

}  // namespace

void error_examples() { example_Error(); }
