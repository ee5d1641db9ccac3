// Bytes of a bool mask as bits.
#pragma once

#include <cstdint>

namespace headway::cuda {

// The sign of each byte is set where the byte is not 0.
__device__ __forceinline__ std::uint32_t signs_where_set(std::uint32_t bytes) {
  return ((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | bytes;
}

// 1 for each byte that is not 0.
__device__ __forceinline__ std::uint32_t as_bools(std::uint32_t bytes) {
  return signs_where_set(bytes) >> 7 & 0x01010101u;
}

// A weighted sum gathers one bit of each of eight bytes, which are 0 but for it once `cleared`: as many places up as it
// stands in them.
template <class Cleared>
__device__ __forceinline__ std::uint32_t eight_bits(std::uint32_t low, std::uint32_t high, const Cleared& cleared) {
  const std::uint32_t four = __dp4a(cleared(low), 0x08040201u, 0u);
  return __dp4a(cleared(high), 0x80402010u, four);
}

// Of 16 bytes that are 0 or 1.
__device__ __forceinline__ std::uint32_t bits_of_bools(const uint4& bools) {
  const auto as_they_are = [](std::uint32_t word) { return word; };
  return eight_bits(bools.x, bools.y, as_they_are) | eight_bits(bools.z, bools.w, as_they_are) << 8;
}

// A bit for each byte that is not 0: their signs are gathered, 7 places too high.
__device__ __forceinline__ std::uint32_t high_bits_of_bytes(std::uint32_t low, std::uint32_t high) {
  return eight_bits(low, high, [](std::uint32_t word) { return signs_where_set(word) & 0x80808080u; });
}

__device__ __forceinline__ std::uint32_t bits_of_eight_bytes(std::uint32_t low, std::uint32_t high) {
  return high_bits_of_bytes(low, high) >> 7;
}

__device__ __forceinline__ std::uint32_t bits_of_bytes(const uint4& bytes) {
  return high_bits_of_bytes(bytes.x, bytes.y) >> 7 | high_bits_of_bytes(bytes.z, bytes.w) << 1;
}

}  // namespace headway::cuda
