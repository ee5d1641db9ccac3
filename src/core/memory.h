// Memory for tensors and for what a call keeps, 64-byte aligned.
//
// The first touch of a page costs more than the work that fills it: the system finds it and clears it. Where a call
// makes a matrix of weights, that is most of its time. So blocks of some size that are given back are kept for the next
// of their size, and large ones lie on huge pages where there are any. Their pages are the system's to take when it is
// short of memory; until then using one again costs nothing.
#pragma once

#include <cstddef>
#include <memory>

namespace headway {

constexpr std::size_t kept_block = std::size_t{128} << 10;  // bytes, from which on a block is kept

// Whether every block is the system's own, of the very size asked for and given back at once, so that a sanitizer sees
// each step past its end or after its time (memory_exact.cpp).
extern const bool exact_blocks;

// Null where the system refuses.
void* take_memory(std::size_t bytes) noexcept;

// What take_memory gave for so many bytes, or null.
void give_back_memory(void* memory, std::size_t bytes) noexcept;

// The same with an owner.
struct GiveBack {
  std::size_t bytes = 0;
  void operator()(void* memory) const noexcept { give_back_memory(memory, bytes); }
};
using Memory = std::unique_ptr<void, GiveBack>;

inline Memory owned_memory(std::size_t bytes) noexcept { return {take_memory(bytes), GiveBack{bytes}}; }

}  // namespace headway
