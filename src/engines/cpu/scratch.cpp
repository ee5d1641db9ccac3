// Scratch memory, and what threads keep of it.
#include "engines/cpu/scratch.h"

#include <algorithm>
#include <new>
#include <utility>

namespace headway::cpu {
namespace {

// What a thread keeps at most, by owner: as many threads have a task as there are workers, few make calls.
constexpr std::int64_t most_kept[] = {std::int64_t{8} << 20, std::int64_t{64} << 20};

// Kernels walk through all of their scratch all the time. More than this on small pages does not fit the first-level
// TLB, and one huge page is as good for little as for much.
constexpr std::int64_t small_pages_bytes = std::int64_t{256} << 10;
constexpr std::int64_t huge_page_bytes = std::int64_t{2} << 20;

}  // namespace

struct KeptMemory::Block {
  Memory memory;
  std::int64_t bytes = 0;
};

// Null when the thread has destroyed what it kept: static destructors and other thread_locals may still make calls.
KeptMemory::Block* KeptMemory::kept(Owner owner) noexcept {
  constinit static thread_local bool ended = false;  // without a destructor, so there to the end
  struct Both {
    Block blocks[2];
    ~Both() { ended = true; }
  };
  if (ended) {
    return nullptr;
  }
  static thread_local Both both;
  return &both.blocks[static_cast<int>(owner)];
}

KeptMemory::KeptMemory(Owner owner) noexcept : owner_(owner) {
  if (Block* own = kept(owner); own != nullptr) {
    memory_ = std::move(own->memory);
    bytes_ = std::exchange(own->bytes, 0);
  }
}

KeptMemory::~KeptMemory() {
  if (exact_blocks || bytes_ > most_kept[static_cast<int>(owner_)]) {
    return;
  }
  if (Block* own = kept(owner_); own != nullptr && bytes_ > own->bytes) {
    own->memory = std::move(memory_);
    own->bytes = bytes_;
  }
}

void* KeptMemory::at_least(std::int64_t bytes) {
  if (bytes_ < bytes || exact_blocks) {
    const bool rounds = !exact_blocks && bytes > small_pages_bytes;
    const std::int64_t wanted = rounds ? std::max(bytes, huge_page_bytes) : bytes;
    bytes_ = 0;
    memory_.reset();
    memory_ = owned_memory(static_cast<std::size_t>(wanted));
    if (memory_ == nullptr) {
      throw std::bad_alloc();
    }
    bytes_ = wanted;
  }
  return memory_.get();
}

}  // namespace headway::cpu
