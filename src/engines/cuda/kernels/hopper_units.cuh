// Blocks of a mask or bias [B,H,Sq,Sk] in shared memory, ahead of the scores that they change.
//
// A unit is what one consumer needs for one block of keys: 64 rows of the bias or, without one, of the mask. The copy
// engine brings it in boxes of 128 bytes a row, swizzled as the other tiles are (a mask of 64 keys has boxes of 64
// bytes). Rows that do not suit it are copied by the guard (hopper_unit_rows.cuh), and so is what has no rows, element
// by element. Each consumer has one to four places of its own. What a unit holds when it is ready:
// - a bias, as it lies in memory, with -inf where a mask forbids;
// - a mask, as it lies in memory: the consumer turns bytes into bits while its products are on their way.
#pragma once

#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"
#include "engines/cuda/kernels/hopper_matrix.cuh"
#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/kernels/mask_bits.cuh"
#include "engines/cuda/ptx/warp.cuh"
#include "engines/cuda/ptx/warp_matrix.cuh"

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
#pragma unroll 4
  for (int column = 0; column < columns; ++column) {
    unit[chunk_offset<keys>(row, column / 16) + column % 16] = from[column * args.mask.key];
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
  if (args.units.source == UnitSource::elements) {
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
    read_mask_row<keys>(args, origin, unit, row);
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
    ptx::barrier_arrive(ptx::shared_address(&memory.unit_ready[slot]));
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
    ptx::load_matrices(box + chunk_offset<box_row_bytes>(row, 2 * (k % 4) + unit.lane / 16), words);
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

// The bits of a thread's two rows: column 8 j + 2 q + c of quad lane q has mask_bit(j, c). Each lane turns a quarter of
// its rows' bytes into bits; those that it needs are two of every eight, from all four lanes.
__device__ constexpr int mask_bit(int j, int c) { return 8 * (j / 8 * 2 + j % 2) + 2 * (j / 2 % 4) + c; }

template <int keys>
__device__ __forceinline__ void load_mask(const UnitView& unit, std::uint32_t (&bits)[2]) {
  constexpr int each = keys / 64;  // chunks of 16 columns for a lane
  const int q = unit.lane & 3;
  // Neighbouring rows begin at different chunks, which lie in different banks.
  const int first = unit.row(unit.lane / 4) % each;
  uint4 chunks[2][each];
  std::uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = unit.row(unit.lane / 4 + 8 * i);
#pragma unroll
    for (int k = 0; k < each; ++k) {
      uint4& chunk = chunks[i][k];
      chunk = ptx::load_chunk(unit.shared + chunk_offset<keys>(row, 4 * (k ^ first) + q));
      all |= chunk.x | chunk.y | chunk.z | chunk.w;
    }
  }
  if (__any_sync(~0u, (all & 0xFEFEFEFEu) != 0)) [[unlikely]] {  // a true that is not 1
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < each; ++k) {
        uint4& chunk = chunks[i][k];
        chunk = {as_bools(chunk.x), as_bools(chunk.y), as_bools(chunk.z), as_bools(chunk.w)};
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t own = bits_of_bools(chunks[i][0]);
    if constexpr (each == 2) {
      own += bits_of_bools(chunks[i][1]) << 16;
      own = __funnelshift_l(own, own, 16 * first);
    }
    bits[i] = 0;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      bits[i] += (__shfl_sync(~0u, own, p, 4) >> (2 * q) & 0x03030303u) << (2 * p);
    }
  }
}

template <int count>
__device__ __forceinline__ void apply_mask(const std::uint32_t (&bits)[2], float (&scores)[count]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < count / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[4 * j + 2 * i + c];
        score = (bits[i] & 1u << mask_bit(j, c)) != 0 ? score : minus_infinity;
      }
    }
  }
}

}  // namespace headway::cuda
