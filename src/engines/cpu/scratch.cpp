// Scratch memory of one thread.
#include "engines/cpu/scratch.h"

#include <algorithm>
#include <new>
#include <utility>

namespace headway::cpu {
namespace {

constexpr std::int64_t kept_bytes = std::int64_t{8} << 20;
// Kernels walk through all of their scratch all the time. More than this on small pages does not fit the first-level
// TLB, and one huge page is as good for little as for much.
constexpr std::int64_t small_pages_bytes = std::int64_t{256} << 10;
constexpr std::int64_t huge_page_bytes = std::int64_t{2} << 20;
constexpr std::int64_t kept_call_bytes = std::int64_t{64} << 20;

Memory taken(std::int64_t bytes) {
  Memory memory = owned_memory(static_cast<std::size_t>(bytes));
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

class Buffer {
 public:
  void* at_least(std::int64_t bytes) {
    if (bytes_ < bytes) {
      const std::int64_t wanted = bytes > small_pages_bytes ? std::max(bytes, huge_page_bytes) : bytes;
      release();
      memory_ = taken(wanted);
      bytes_ = wanted;
    }
    return memory_.get();
  }

  void trim() {
    if (bytes_ > kept_bytes) {
      release();
    }
  }

 private:
  void release() {
    memory_.reset();
    bytes_ = 0;
  }

  Memory memory_;
  std::int64_t bytes_ = 0;
};

struct Buffers {
  Buffer own, shared;
};

Buffers& buffers() {
  thread_local Buffers all;
  return all;
}

}  // namespace

void* thread_scratch(std::int64_t bytes) { return buffers().own.at_least(bytes); }

void* shared_scratch(std::int64_t bytes) { return buffers().shared.at_least(bytes); }

void trim_thread_scratch() { buffers().own.trim(); }

void trim_shared_scratch() { buffers().shared.trim(); }

struct CallMemory::Kept {
  Memory memory;
  std::int64_t bytes = 0;
};

CallMemory::Kept& CallMemory::kept() {
  thread_local Kept memory;
  return memory;
}

CallMemory::CallMemory() : memory_(std::move(kept().memory)), bytes_(std::exchange(kept().bytes, 0)) {}

CallMemory::~CallMemory() {
  if (bytes_ <= kept_call_bytes && bytes_ > kept().bytes) {
    kept().memory = std::move(memory_);
    kept().bytes = bytes_;
  }
}

void* CallMemory::at_least(std::int64_t bytes) {
  if (bytes_ < bytes) {
    memory_.reset();
    bytes_ = 0;
    memory_ = taken(bytes);
    bytes_ = bytes;
  }
  return memory_.get();
}

}  // namespace headway::cpu
