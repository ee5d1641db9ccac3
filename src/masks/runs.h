// Runs of true in a row of bools.
#pragma once

#include <cstdint>
#include <cstring>

namespace headway {

// The first index from `begin` on whose byte is not `value`; bytes are 0 or 1. Compares eight at a time, since runs are
// long in masks for which spans pay off.
inline std::int64_t end_of_run(const std::uint8_t* bytes, std::int64_t begin, std::int64_t end, std::uint8_t value) {
  const std::uint64_t same = value * std::uint64_t{0x0101010101010101};
  std::int64_t i = begin;
  for (std::uint64_t word = 0; i + 8 <= end; i += 8) {
    std::memcpy(&word, bytes + i, 8);
    if (word != same) {
      break;
    }
  }
  while (i < end && bytes[i] == value) {
    ++i;
  }
  return i;
}

// visit(begin, end) for each run of ones.
template <class Visit>
void for_each_run(const std::uint8_t* bytes, std::int64_t count, const Visit& visit) {
  for (std::int64_t i = end_of_run(bytes, 0, count, 0); i < count;) {
    const std::int64_t end = end_of_run(bytes, i, count, 1);
    visit(i, end);
    i = end_of_run(bytes, end, count, 0);
  }
}

}  // namespace headway
