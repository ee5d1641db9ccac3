// Memory for tensors and workspaces, 64-byte aligned.
// Touching a page for the first time costs more than the work that fills it, because the system has to find and clear
// it; where a call allocates a matrix of weights, that is most of its time. So freed blocks above a size are cached for
// the next allocation of the same size, and large ones lie on huge pages where the system has them. The system may
// reclaim the pages of a cached block (MADV_FREE); until then, reusing it costs nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace headway {

constexpr std::size_t kept_block = std::size_t{128} << 10;  // bytes; smaller blocks are not cached

// True in builds that cache nothing: every block has exactly the size asked for and is freed at once, so that a
// sanitizer sees out-of-bounds and use-after-free accesses (memory_exact.cpp).
extern const bool exact_blocks;

// Null if the system refuses.
void* take_memory(std::size_t bytes) noexcept;

// Frees a block that take_memory returned for this many bytes; null is allowed.
void give_back_memory(void* memory, std::size_t bytes) noexcept;

// Returns the cached blocks to the system; returns their bytes.
std::int64_t release_cached_memory() noexcept;

// The same as take and give back, with an owner.
struct GiveBack {
  std::size_t bytes = 0;
  void operator()(void* memory) const noexcept { give_back_memory(memory, bytes); }
};
using Memory = std::unique_ptr<void, GiveBack>;

inline Memory owned_memory(std::size_t bytes) noexcept { return {take_memory(bytes), GiveBack{bytes}}; }

}  // namespace headway
