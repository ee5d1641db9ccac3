// Blocks of a mask or bias [B,H,Sq,Sk], from device memory into the layout of a warpgroup's scores.
//
// Each lane of a quad reads 8 neighbouring columns of its two rows in one access, so that a quad reads 32 columns of a
// row: whole sectors. Shuffles inside the quad then give each lane the pairs that it has scores for. The loads are
// issued before the scores are there and used after: see HopperConsumer::step.
#pragma once

#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/hopper_finish.cuh"
#include "engines/cuda/kernels/hopper_shared.cuh"

namespace headway::cuda {

// The offset of (b, h, i, key); i is cut to the rows that exist.
__device__ __forceinline__ std::int64_t matrix_offset(const Matrix& matrix, const HopperWork& work, int tile_row,
                                                      int key) {
  const std::int64_t row = work.row + min(tile_row, work.stored_rows - 1);
  return work.batch * matrix.batch + work.head * matrix.head + row * matrix.query + key * matrix.key;
}

__device__ __forceinline__ float load_bias(const Matrix& bias, std::int64_t offset) {
  return load_number<float>(bias.data, bias.dtype, offset);
}

// Eight neighbouring elements of 1, 2 or 4 bytes.
template <class Bits>
struct Chunk {
  std::uint32_t words[2 * sizeof(Bits)];

  __device__ __forceinline__ void load_whole(const Bits* from) {
    if constexpr (sizeof(Bits) == 1) {
      const uint2 loaded = *reinterpret_cast<const uint2*>(from);
      words[0] = loaded.x;
      words[1] = loaded.y;
    } else {
#pragma unroll
      for (int part = 0; part < static_cast<int>(sizeof(Bits)) / 2; ++part) {
        const uint4 loaded = reinterpret_cast<const uint4*>(from)[part];
        words[4 * part] = loaded.x;
        words[4 * part + 1] = loaded.y;
        words[4 * part + 2] = loaded.z;
        words[4 * part + 3] = loaded.w;
      }
    }
  }

  // One by one, from the last: each shifts the others up. Of the row's `columns` that are left some may not exist; they
  // are 0.
  __device__ __forceinline__ void load_single(const Bits* from, std::int64_t stride, int columns) {
    constexpr int count = 2 * sizeof(Bits);
#pragma unroll
    for (int w = 0; w < count; ++w) {
      words[w] = 0;
    }
#pragma unroll 1
    for (int e = min(columns, 8) - 1; e >= 0; --e) {
      const std::uint32_t loaded = from[e * stride];
      if constexpr (sizeof(Bits) == 4) {
#pragma unroll
        for (int w = count - 1; w > 0; --w) {
          words[w] = words[w - 1];
        }
        words[0] = loaded;
      } else {
        constexpr int bits = 8 * sizeof(Bits);
#pragma unroll
        for (int w = count - 1; w > 0; --w) {
          words[w] = __funnelshift_l(words[w - 1], words[w], bits);
        }
        words[0] = words[0] << bits | loaded;
      }
    }
  }
};

// One bit for each byte that is not 0.
__device__ __forceinline__ std::uint32_t byte_bits(std::uint32_t bytes) {
  const std::uint32_t high = (((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | bytes) & 0x80808080u;
  return ((high >> 7) * 0x10204080u) >> 28;
}

// What a thread has read of a block ahead of time: a bias of a half type, or else a mask.
template <int keys>
struct FetchedMatrix {
  static constexpr int groups = keys / 32;  // of columns
  Chunk<std::uint16_t> chunks[2][groups > 0 ? groups : 1];
};

// Reads the lane's chunks of a block and calls visit(row 0 or 1, group of columns, chunk).
template <class Bits, int keys, class Visit>
__device__ __forceinline__ void for_each_chunk(const Matrix& matrix, bool in_chunks, const HopperWork& work,
                                               int tile_row, int first_key, int quad_lane, const Visit& visit) {
  const int key = first_key + 8 * quad_lane;
  const bool whole = in_chunks && first_key + keys <= work.key_count;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Bits* row = static_cast<const Bits*>(matrix.data) + matrix_offset(matrix, work, tile_row + 8 * i, key);
    if (whole) {
#pragma unroll
      for (int g = 0; g < keys / 32; ++g) {
        Chunk<Bits> chunk;
        chunk.load_whole(row + 32 * g);
        visit(i, g, chunk);
      }
    } else {
#pragma unroll
      for (int g = 0; g < keys / 32; ++g) {
        Chunk<Bits> chunk;
        chunk.load_single(row + 32 * g * matrix.key, matrix.key, work.key_count - key - 32 * g);
        visit(i, g, chunk);
      }
    }
  }
}

template <int keys>
__device__ __forceinline__ void fetch_bias(const HopperArguments& args, const HopperWork& work, int tile_row,
                                           int first_key, int quad_lane, FetchedMatrix<keys>& fetched) {
  for_each_chunk<std::uint16_t, keys>(
      args.bias, args.bias_in_chunks, work, tile_row, first_key, quad_lane,
      [&](int i, int g, const Chunk<std::uint16_t>& chunk) { fetched.chunks[i][g] = chunk; });
}

template <int keys>
__device__ __forceinline__ void fetch_mask(const HopperArguments& args, const HopperWork& work, int tile_row,
                                           int first_key, int quad_lane, FetchedMatrix<keys>& fetched) {
  for_each_chunk<std::uint8_t, keys>(args.mask, args.mask_in_chunks, work, tile_row, first_key, quad_lane,
                                     [&](int i, int g, const Chunk<std::uint8_t>& chunk) {
                                       fetched.chunks[i][g].words[0] = chunk.words[0];
                                       fetched.chunks[i][g].words[1] = chunk.words[1];
                                     });
}

// A bias of -inf forbids, also where the score is NaN.
__device__ __forceinline__ void add_one_bias(float& score, float bias) {
  score = bias == minus_infinity ? minus_infinity : score + bias;
}

template <class Half, int count, int keys>
__device__ __forceinline__ void add_half_bias(FetchedMatrix<keys>& fetched, int quad_lane, float (&scores)[count]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int g = 0; g < keys / 32; ++g) {
      auto& words = fetched.chunks[i][g].words;
      transpose_quad(words, quad_lane);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 pair = ptx::unpacked_pair<Half>(words[k]);
        add_one_bias(scores[4 * (4 * g + k) + 2 * i], pair.x);
        add_one_bias(scores[4 * (4 * g + k) + 2 * i + 1], pair.y);
      }
    }
  }
}

// A bias of f32 would need too many registers to be read ahead: group by group.
template <int count, int keys>
__device__ __forceinline__ void add_f32_bias(const HopperArguments& args, const HopperWork& work, int tile_row,
                                             int first_key, int quad_lane, float (&scores)[count]) {
  for_each_chunk<std::uint32_t, keys>(
      args.bias, args.bias_in_chunks, work, tile_row, first_key, quad_lane,
      [&](int i, int g, const Chunk<std::uint32_t>& chunk) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          std::uint32_t words[4] = {chunk.words[c], chunk.words[2 + c], chunk.words[4 + c], chunk.words[6 + c]};
          transpose_quad(words, quad_lane);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            add_one_bias(scores[4 * (4 * g + k) + 2 * i + c], __uint_as_float(words[k]));
          }
        }
      });
}

// Bytes become bits, a quad's lanes collect all of them, and each tests those of its own columns.
template <int count, int keys>
__device__ __forceinline__ void apply_mask(const FetchedMatrix<keys>& fetched, int lane, float (&scores)[count]) {
  const int quad_lane = lane & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t own = 0;  // byte g: the lane's 8 columns of group g
#pragma unroll
    for (int g = 0; g < keys / 32; ++g) {
      const auto& words = fetched.chunks[i][g].words;
      own |= (byte_bits(words[0]) | byte_bits(words[1]) << 4) << (8 * g);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const std::uint32_t bits = __shfl_sync(~0u, own, (lane & ~3) + k) >> (2 * quad_lane);
#pragma unroll
      for (int g = 0; g < keys / 32; ++g) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[4 * (4 * g + k) + 2 * i + c];
          score = (bits >> (8 * g + c) & 1) != 0 ? score : minus_infinity;
        }
      }
    }
  }
}

}  // namespace headway::cuda
