// Replaces memory.cpp in a build with the address sanitizer: blocks of exactly the size asked for, none of them cached.
#include <algorithm>
#include <cstdlib>

#include "core/memory.h"

namespace headway {

const bool exact_blocks = true;

std::int64_t release_cached_memory() noexcept { return 0; }

void* take_memory(std::size_t bytes) noexcept {
  constexpr std::size_t alignment = 64;
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, std::max<std::size_t>(bytes, 1)) == 0 ? memory : nullptr;
}

void give_back_memory(void* memory, std::size_t) noexcept { std::free(memory); }

}  // namespace headway
