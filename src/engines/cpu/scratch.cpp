// Scratch memory of one thread.
#include "engines/cpu/scratch.h"

#include <cstdlib>
#include <memory>
#include <new>

namespace headway::cpu {
namespace {

constexpr std::int64_t kept_bytes = std::int64_t{8} << 20;

struct Free {
  void operator()(void* memory) const noexcept { std::free(memory); }
};

struct Buffer {
  std::unique_ptr<void, Free> memory;
  std::int64_t bytes = 0;
};

Buffer& buffer() {
  thread_local Buffer own;
  return own;
}

}  // namespace

void* thread_scratch(std::int64_t bytes) {
  Buffer& own = buffer();
  if (own.bytes < bytes) {
    own.memory.reset();
    own.bytes = 0;
    const std::int64_t rounded = (bytes + 4095) / 4096 * 4096;
    own.memory.reset(std::aligned_alloc(64, static_cast<std::size_t>(rounded)));
    if (own.memory == nullptr) {
      throw std::bad_alloc();
    }
    own.bytes = rounded;
  }
  return own.memory.get();
}

void trim_thread_scratch() {
  if (Buffer& own = buffer(); own.bytes > kept_bytes) {
    own.memory.reset();
    own.bytes = 0;
  }
}

}  // namespace headway::cpu
