// Memory blocks, and the cache of freed ones.
#include "core/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>

namespace headway {
namespace {

constexpr std::size_t alignment = 64;
constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t step = std::size_t{64} << 10;  // granularity of the block sizes below
constexpr std::size_t most_cached = std::size_t{256} << 20;
constexpr std::size_t most_blocks = 64;

std::size_t rounded(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// The allocated size of a block that is cached after use.
std::size_t block_bytes(std::size_t bytes) { return rounded(bytes, bytes < huge_page ? step : huge_page); }

// Whole huge pages; the ends of a larger mapping are cut off to align them.
void* map_pages(std::size_t bytes) noexcept {
  const std::size_t mapped = bytes + huge_page;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  char* begin = static_cast<char*>(memory);
  const std::size_t before = (huge_page - reinterpret_cast<std::uintptr_t>(begin) % huge_page) % huge_page;
  if (before != 0) {
    munmap(begin, before);
  }
  munmap(begin + before + bytes, huge_page - before);
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // a hint: without huge pages, small ones work too
  return begin + before;
}

void* fresh_block(std::size_t bytes) noexcept {
  return bytes < huge_page ? std::aligned_alloc(alignment, bytes) : map_pages(bytes);
}

void release_block(void* memory, std::size_t bytes) noexcept {
  if (bytes < huge_page) {
    std::free(memory);
  } else {
    munmap(memory, bytes);
  }
}

// Freed blocks, oldest first. No thread waits for the lock: if it is taken, the thread uses the system's allocator, and
// so does a child forked while another thread held it.
class BlockCache {
 public:
  void* take(std::size_t bytes) noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    for (std::size_t n = lock ? count_ : 0; n-- > 0;) {
      if (blocks_[n].bytes == bytes) {
        void* memory = blocks_[n].memory;
        remove(n);
        return memory;
      }
    }
    return nullptr;
  }

  bool put(void* memory, std::size_t bytes) noexcept {
    if (bytes > most_cached) {
      return false;
    }
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {
      return false;
    }
    while (count_ == most_blocks || bytes_ + bytes > most_cached) {
      release_block(blocks_[0].memory, blocks_[0].bytes);
      remove(0);
    }
    if (bytes >= huge_page) {
      madvise(memory, bytes, MADV_FREE);
    }
    blocks_[count_++] = {memory, bytes};
    bytes_ += bytes;
    return true;
  }

  std::int64_t clear() noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {
      return 0;
    }
    const auto bytes = static_cast<std::int64_t>(bytes_);
    for (; count_ > 0; --count_) {
      release_block(blocks_[count_ - 1].memory, blocks_[count_ - 1].bytes);
    }
    bytes_ = 0;
    return bytes;
  }

 private:
  struct Block {
    void* memory;
    std::size_t bytes;
  };

  void remove(std::size_t n) noexcept {
    bytes_ -= blocks_[n].bytes;
    std::copy(blocks_ + n + 1, blocks_ + count_, blocks_ + n);
    --count_;
  }

  std::mutex mutex_;
  Block blocks_[most_blocks] = {};
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
};

constinit BlockCache block_cache;  // its destructor does nothing: tensors may outlive it

}  // namespace

const bool exact_blocks = false;

void* take_memory(std::size_t bytes) noexcept {
  if (bytes < kept_block) {
    return std::aligned_alloc(alignment, rounded(std::max(bytes, alignment), alignment));
  }
  if (bytes > SIZE_MAX / 2) {
    return nullptr;
  }
  void* memory = block_cache.take(block_bytes(bytes));
  return memory != nullptr ? memory : fresh_block(block_bytes(bytes));
}

std::int64_t release_cached_memory() noexcept { return block_cache.clear(); }

void give_back_memory(void* memory, std::size_t bytes) noexcept {
  if (memory == nullptr || bytes < kept_block) {
    std::free(memory);
  } else if (!block_cache.put(memory, block_bytes(bytes))) {
    release_block(memory, block_bytes(bytes));
  }
}

}  // namespace headway
