// Calls that static destructors, thread_local destructors and atexit handlers make: the calling thread has destroyed
// its thread_locals by then, and gets the same bits as ever.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "headway/headway.h"

namespace {

using namespace headway;

const Dims long_sizes{2, 8, 300, 64}, one_query{1, 4, 1, 64}, many_keys{1, 4, 4096, 64};

Tensor numbers(const Dims& sizes) {
  Tensor result(sizes);
  for (std::int64_t n = 0; n < result.elements(); ++n) {
    result.as<float>()[n] = static_cast<float>(n % 17);
  }
  return result;
}

struct Outputs {
  Tensor many{long_sizes}, one{one_query}, dq{long_sizes}, dk{long_sizes}, dv{long_sizes};

  void compute(int threads) {
    set_threads(threads);
    const Tensor q = numbers(long_sizes), keys = numbers(many_keys);
    Tensor lse({2, 8, 300});
    attention(q, q, q, many, {.causal = Causal::square}, {.lse = lse});
    attention(numbers(one_query), keys, keys, one);
    attention_backward(q, q, q, q, many, lse, {.dq = dq, .dk = dk, .dv = dv}, {.causal = Causal::square});
  }

  bool same(const Outputs& other) const {
    const auto equal = [](const Tensor& a, const Tensor& b) {
      return std::memcmp(a.data(), b.data(), sizeof(float) * static_cast<std::size_t>(a.elements())) == 0;
    };
    return equal(many, other.many) && equal(one, other.one) && equal(dq, other.dq) && equal(dk, other.dk) &&
           equal(dv, other.dv);
  }
};

// Calls the library when it goes; its own memory stays until then.
struct Late {
  const char* when;
  Outputs expected;

  ~Late() {
    for (int n = 0; n < 5; ++n) {
      Outputs found;
      found.compute(4);
      if (!found.same(expected)) {
        std::fprintf(stderr, "%s: call %d gave other bits\n", when, n);
        std::_Exit(1);
      }
    }
  }
};

Late at_static_destruction{"static destructor", {}};

}  // namespace

int main() {
  thread_local Late at_thread_end{"thread_local destructor",
                                  {}};  // made before the library's own: destroyed after them
  at_thread_end.expected.compute(1);
  at_static_destruction.expected.compute(1);
  std::atexit([] {
    Outputs found;
    found.compute(4);
    if (!found.same(at_static_destruction.expected)) {
      std::fputs("atexit: other bits\n", stderr);
      std::_Exit(1);
    }
  });
}
