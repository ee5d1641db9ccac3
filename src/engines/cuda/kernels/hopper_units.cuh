// Blocks of a mask or bias [B,H,Sq,Sk] in shared memory, ahead of the scores that they change.
//
// A unit is what one consumer needs for one block of keys: 64 rows of the bias or, without one, of the mask. The copy
// engine brings it in boxes of 128 bytes a row, swizzled as the other tiles are (a mask of 64 keys has boxes of 64
// bytes); a layout that it cannot read is copied by the guard. Each consumer has one to four places of its own. What a
// unit holds when it is ready:
// - a bias, as it lies in memory, with -inf where a mask forbids;
// - a mask as bits, in the first bytes of each row: byte j has columns 8 j to 8 j + 7.
#pragma once

#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"
#include "engines/cuda/kernels/hopper_matrix.cuh"
#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/ptx/warp.cuh"

namespace headway::cuda {

inline constexpr int unit_rows = 64;
inline constexpr int box_row_bytes = 128;

// A consumer's place: which of its own, and the parity of its phase.
struct UnitPosition {
  int place = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance(int each) {
    if (++place == each) {
      place = 0;
      parity ^= 1;
    }
  }
};

// Barriers and places are numbered over all consumers.
__device__ __forceinline__ int unit_slot(const UnitArguments& units, int consumer, UnitPosition position) {
  return consumer * units.each + position.place;
}

// The offset of a 16-byte chunk in a box whose rows have so many bytes.
template <int row_bytes>
__device__ __forceinline__ std::uint32_t chunk_offset(int row, int chunk) {
  static_assert(row_bytes == 128 || row_bytes == 64);
  const std::uint32_t linear = row * row_bytes + chunk * 16;
  return linear ^ (linear >> 3 & (row_bytes - 16));
}

// ---- Bytes of a mask to bits ----

// 1 for each byte that is not 0.
__device__ __forceinline__ std::uint32_t as_bools(std::uint32_t bytes) {
  return (((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | bytes) >> 7 & 0x01010101u;
}

// The bits of eight columns, whose bytes are 0 or 1.
__device__ __forceinline__ std::uint32_t eight_bits(std::uint32_t low, std::uint32_t high) {
  return __dp4a(high, 0x80402010u, __dp4a(low, 0x08040201u, 0u));
}

// A row of bytes in shared memory becomes its bits, in its own place.
template <int keys>
__device__ __forceinline__ void row_to_bits(std::uint8_t* unit, int row) {
  const std::uint32_t begin = ptx::shared_address(unit) + chunk_offset<keys>(row, 0);
  std::uint32_t bits[keys / 32];
#pragma unroll
  for (int word = 0; word < keys / 32; ++word) {
    uint4 chunks[2] = {ptx::load_chunk(begin ^ 32 * word), ptx::load_chunk(begin ^ (32 * word + 16))};
    bits[word] = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint4& chunk = chunks[k];
      if (((chunk.x | chunk.y | chunk.z | chunk.w) & 0xFEFEFEFEu) != 0) [[unlikely]] {  // a true that is not 1
        chunk = {as_bools(chunk.x), as_bools(chunk.y), as_bools(chunk.z), as_bools(chunk.w)};
      }
      bits[word] += eight_bits(chunk.x, chunk.y) << (16 * k) | eight_bits(chunk.z, chunk.w) << (16 * k + 8);
    }
  }
#pragma unroll
  for (int word = 0; word < keys / 32; ++word) {
    ptx::store_shared(begin + 4 * word, bits[word]);
  }
}

// ---- What the copy engine cannot read ----

// The rows that the guard reads itself: those of one consumer at one block of keys.
struct UnitOrigin {
  const HopperWork& work;
  int tile_row, first_key;  // of the unit
};

__device__ __forceinline__ bool is_masked_out(const HopperArguments& args, const UnitOrigin& origin, int row, int key) {
  return static_cast<const std::uint8_t*>(
             args.mask.data)[matrix_offset(args.mask, origin.work, origin.tile_row + row, key)] == 0;
}

template <int keys>
__device__ __forceinline__ void read_mask_row(const HopperArguments& args, const UnitOrigin& origin, std::uint8_t* unit,
                                              int row) {
  const std::uint8_t* from = static_cast<const std::uint8_t*>(args.mask.data) +
                             matrix_offset(args.mask, origin.work, origin.tile_row + row, origin.first_key);
  const int columns = min(keys, origin.work.key_count - origin.first_key);
  std::uint8_t* bits = unit + chunk_offset<keys>(row, 0);
#pragma unroll 1
  for (int column = 0; column < keys; column += 8) {
    std::uint32_t eight = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const bool there = column + e < columns;
      eight |= std::uint32_t{there && from[(column + e) * args.mask.key] != 0} << e;
    }
    bits[column / 8] = static_cast<std::uint8_t>(eight);
  }
}

// Where a bias has one column of a row.
template <class Bits>
__device__ __forceinline__ Bits& bias_at(std::uint8_t* unit, int row, int column) {
  constexpr int columns = box_row_bytes / sizeof(Bits);
  const int byte = column % columns * static_cast<int>(sizeof(Bits));
  std::uint8_t* box = unit + column / columns * unit_rows * box_row_bytes;
  return *reinterpret_cast<Bits*>(box + chunk_offset<box_row_bytes>(row, byte / 16) + byte % 16);
}

template <class Bits, int keys>
__device__ __forceinline__ void read_bias_row(const HopperArguments& args, const UnitOrigin& origin, std::uint8_t* unit,
                                              int row) {
  const Bits* from = static_cast<const Bits*>(args.bias.data) +
                     matrix_offset(args.bias, origin.work, origin.tile_row + row, origin.first_key);
  const int columns = min(keys, origin.work.key_count - origin.first_key);
#pragma unroll 4
  for (int column = 0; column < columns; ++column) {
    bias_at<Bits>(unit, row, column) = from[column * args.bias.key];
  }
}

// A bias under a mask is -inf where that forbids.
template <class Bits, int keys>
__device__ __forceinline__ void forbid_bias_row(const HopperArguments& args, const UnitOrigin& origin,
                                                std::uint8_t* unit, int row, Bits forbidden) {
  const int columns = min(keys, origin.work.key_count - origin.first_key);
#pragma unroll 4
  for (int column = 0; column < columns; ++column) {
    if (is_masked_out(args, origin, row, origin.first_key + column)) {
      bias_at<Bits>(unit, row, column) = forbidden;
    }
  }
}

template <class Bits, int keys>
__device__ __forceinline__ void prepare_bias_row(const HopperArguments& args, const UnitOrigin& origin,
                                                 std::uint8_t* unit, int row, Bits forbidden) {
  if (!args.units.mapped) {
    read_bias_row<Bits, keys>(args, origin, unit, row);
  }
  if (args.mask.data != nullptr) {
    forbid_bias_row<Bits, keys>(args, origin, unit, row, forbidden);
  }
}

// ---- The guard's part ----

template <int keys>
__device__ __forceinline__ void prepare_row(const HopperArguments& args, const UnitOrigin& origin, std::uint8_t* unit,
                                            int row) {
  if (args.bias.data == nullptr) {
    if (!args.units.mapped) {
      read_mask_row<keys>(args, origin, unit, row);
    } else if (!args.units.one_row || row == 0) {
      row_to_bits<keys>(unit, row);
    }
  } else if (args.bias.dtype == DType::f32) {
    prepare_bias_row<std::uint32_t, keys>(args, origin, unit, row, 0xFF800000u);
  } else {
    const std::uint16_t forbidden = args.bias.dtype == DType::bf16 ? 0xFF80u : 0xFC00u;
    prepare_bias_row<std::uint16_t, keys>(args, origin, unit, row, forbidden);
  }
}

// The units of all consumers at a block, when they are full; one thread a row.
template <class Memory>
__device__ __forceinline__ void prepare_units(const HopperArguments& args, Memory& memory, const HopperWork& work,
                                              int block, UnitPosition position, int warp, int lane) {
  constexpr HopperTile tile = Memory::tile;
  static_assert(guard_threads == unit_rows);
#pragma unroll 1
  for (int consumer = 0; consumer < tile.consumers; ++consumer) {
    const int slot = unit_slot(args.units, consumer, position);
    ptx::barrier_wait(ptx::shared_address(&memory.unit_full[slot]), position.parity);
    prepare_row<tile.keys>(args, {work, unit_rows * consumer, block * tile.keys},
                           memory.units + slot * args.units.bytes, 32 * warp + lane);
    ptx::shared_writes_to_async_fence();  // the copy engine writes there next
    __syncwarp();
    if (lane == 0) {
      ptx::barrier_arrive(ptx::shared_address(&memory.unit_ready[slot]));
    }
  }
}

// ---- The consumer's part ----

// A thread's view of a ready unit, for its two rows.
struct UnitView {
  std::uint32_t shared;  // address of the unit
  int warp_row;          // the warp's first row in it
  int lane;
  bool one_row;

  __device__ __forceinline__ int row(int r) const { return one_row ? 0 : warp_row + r; }
};

// A bias of -inf forbids, also where the score is NaN: they are looked for while the others are added, and put in place
// afterwards.
template <class Half, int count>
__device__ __forceinline__ void add_half_bias(const UnitView& unit, float scale, float (&scores)[count]) {
  const int row = unit.row(unit.lane & 15);
  const auto load = [&](int k, std::uint32_t(&words)[4]) {
    const std::uint32_t box = unit.shared + k / 4 * unit_rows * box_row_bytes;
    ptx::load_matrices(words, box + chunk_offset<box_row_bytes>(row, 2 * (k % 4) + unit.lane / 16));
  };
  std::uint32_t lowest[2] = {0, 0};
#pragma unroll
  for (int k = 0; k < count / 8; ++k) {
    std::uint32_t words[4];
    load(k, words);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      lowest[w % 2] = ptx::lower_pair<Half>(lowest[w % 2], words[w]);
      const float2 bias = ptx::unpacked_pair<Half>(words[w]);
      scores[8 * k + 2 * w] = fmaf(scores[8 * k + 2 * w], scale, bias.x);
      scores[8 * k + 2 * w + 1] = fmaf(scores[8 * k + 2 * w + 1], scale, bias.y);
    }
  }
  const float2 found = ptx::unpacked_pair<Half>(ptx::lower_pair<Half>(lowest[0], lowest[1]));
  if (__any_sync(~0u, fminf(found.x, found.y) == minus_infinity)) {
#pragma unroll
    for (int k = 0; k < count / 8; ++k) {
      std::uint32_t words[4];
      load(k, words);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 bias = ptx::unpacked_pair<Half>(words[w]);
        scores[8 * k + 2 * w] = bias.x == minus_infinity ? minus_infinity : scores[8 * k + 2 * w];
        scores[8 * k + 2 * w + 1] = bias.y == minus_infinity ? minus_infinity : scores[8 * k + 2 * w + 1];
      }
    }
  }
}

template <int count>
__device__ __forceinline__ void add_f32_bias(const UnitView& unit, float scale, float (&scores)[count]) {
  const int quad_lane = unit.lane & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = unit.row(unit.lane / 4 + 8 * i);
#pragma unroll
    for (int j = 0; j < count / 4; ++j) {
      const std::uint32_t box = unit.shared + j / 4 * unit_rows * box_row_bytes + quad_lane % 2 * 8;
      const float2 bias = ptx::load_shared_pair(box + chunk_offset<box_row_bytes>(row, 2 * (j % 4) + quad_lane / 2));
      float& first = scores[4 * j + 2 * i];
      float& second = scores[4 * j + 2 * i + 1];
      first = bias.x == minus_infinity ? minus_infinity : fmaf(first, scale, bias.x);
      second = bias.y == minus_infinity ? minus_infinity : fmaf(second, scale, bias.y);
    }
  }
}

// A row's bits for lane q of its quad: column 8 j + 2 q + c has bit 8 (j % 4) + 2 (j / 4) + c.
template <int keys>
__device__ __forceinline__ std::uint32_t lane_bits(std::uint32_t row_bits, int q) {
  std::uint32_t result = 0;
#pragma unroll
  for (int word = 0; word < keys / 32; ++word) {
    result += (ptx::load_shared(row_bits + 4 * word) >> (2 * q) & 0x03030303u) << (2 * word);
  }
  return result;
}

template <int keys, int count>
__device__ __forceinline__ void apply_mask(const UnitView& unit, float (&scores)[count]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = unit.row(unit.lane / 4 + 8 * i);
    const std::uint32_t bits = lane_bits<keys>(unit.shared + chunk_offset<keys>(row, 0), unit.lane & 3);
#pragma unroll
    for (int j = 0; j < count / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[4 * j + 2 * i + c];
        score = (bits & 1u << (8 * (j % 4) + 2 * (j / 4) + c)) != 0 ? score : minus_infinity;
      }
    }
  }
}

}  // namespace headway::cuda
