#include "examples.h"

using namespace headway;

namespace {

void example_get_threads() {
  const int threads = get_threads();
  std::cout << (threads >= 1) << '\n';  // true
}

void example_set_threads() {
  const int before = get_threads();
  set_threads(1);
  std::cout << get_threads() << '\n';  // 1
  set_threads(before);
}

void example_set_executor() {
  // A program with a thread pool of its own would call work(context) on each of its threads.
  set_executor([](void (*work)(void* context), void* context) { work(context); });
  const Tensor x({1, 8, 64, 32});
  Tensor out({1, 8, 64, 32});
  attention(x, x, x, out);
  set_executor(nullptr);  // the library's own threads again
}

void example_release_memory() {
  // After the last call for a while: what is kept for the next one goes back to the system.
  const std::int64_t bytes = release_memory();
  std::cout << (bytes >= 0) << '\n';  // true
}

}  // namespace

void threads_examples() {
  example_get_threads();
  example_set_threads();
  example_set_executor();
  example_release_memory();
}
