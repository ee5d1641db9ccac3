// src/core/memory.cpp's place in tests that are linked with this file: each block ends at a page that nobody may touch,
// so that a kernel's step past the end of a tensor or of its scratch ends the program, in any build. Blocks begin at
// multiples of 64 bytes; the bytes between a block's end and the fence are NaNs, and must stay so.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "core/memory.h"

namespace headway {
namespace {

constexpr std::size_t alignment = 64;
constexpr int not_a_number = 0xff;  // in every byte, of every float type

std::size_t rounded(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Extent {
  std::size_t block, pages, page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

  explicit Extent(std::size_t bytes) : block(rounded(std::max<std::size_t>(bytes, 1), alignment)) {
    pages = rounded(block, page);
  }
};

bool is_untouched(const char* begin, std::size_t bytes) {
  return bytes == 0 ||
         (static_cast<unsigned char>(*begin) == not_a_number && std::memcmp(begin, begin + 1, bytes - 1) == 0);
}

// Freed blocks, for the next ones with as many pages: mapping pages would take most of a test's time. They hold NaNs,
// so a result of reading one shows, and none may have been written when it is taken again.
class FreeBlocks {
 public:
  // The fence behind the pages of a block, or null.
  char* take(std::size_t pages) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(pages);
    if (found == blocks_.end() || found->second.empty()) return nullptr;
    const Block free = found->second.back();
    found->second.pop_back();
    kept_ -= pages;
    if (!is_untouched(free.fence - free.bytes, free.bytes)) {
      std::fprintf(stderr, "a block of %zu bytes was written after it had been freed\n", free.bytes);
      std::abort();
    }
    return free.fence;
  }

  bool keep(std::size_t pages, char* fence, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (kept_ + pages > most) return false;
    std::memset(fence - bytes, not_a_number, bytes);
    blocks_[pages].push_back({fence, bytes});
    kept_ += pages;
    return true;
  }

 private:
  struct Block {
    char* fence;
    std::size_t bytes;
  };

  static constexpr std::size_t most = std::size_t{64} << 20;

  std::mutex mutex_;
  std::map<std::size_t, std::vector<Block>> blocks_;
  std::size_t kept_ = 0;
};

FreeBlocks& free_blocks() {
  static FreeBlocks& blocks = *new FreeBlocks;  // never destroyed: static objects may own memory
  return blocks;
}

char* mapped(const Extent& extent) {
  void* memory = mmap(nullptr, extent.pages + extent.page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  char* fence = static_cast<char*>(memory) + extent.pages;
  mprotect(fence, extent.page, PROT_NONE);
  return fence;
}

}  // namespace

const bool exact_blocks = true;

std::int64_t release_cached_memory() noexcept { return 0; }

void* take_memory(std::size_t bytes) noexcept {
  if (bytes > SIZE_MAX / 2) {
    return nullptr;
  }
  const Extent extent(bytes);
  char* fence = free_blocks().take(extent.pages);
  if (fence == nullptr) {
    fence = mapped(extent);
  }
  if (fence == nullptr) {
    return nullptr;
  }
  char* block = fence - extent.block;
  std::memset(block, not_a_number, extent.block);  // what nobody wrote shows, too
  return block;
}

void give_back_memory(void* memory, std::size_t bytes) noexcept {
  if (memory == nullptr) {
    return;
  }
  const Extent extent(bytes);
  const auto* block = static_cast<const unsigned char*>(memory);
  if (std::any_of(block + bytes, block + extent.block, [](unsigned char byte) { return byte != not_a_number; })) {
    std::fprintf(stderr, "a block of %zu bytes was written past its end\n", bytes);
    std::abort();
  }
  char* fence = static_cast<char*>(memory) + extent.block;
  if (!free_blocks().keep(extent.pages, fence, extent.block)) {
    munmap(fence - extent.pages, extent.pages + extent.page);
  }
}

}  // namespace headway
