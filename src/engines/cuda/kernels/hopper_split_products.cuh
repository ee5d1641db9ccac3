// Products of f32 numbers in three bf16 parts (split_tile.cuh) by a warpgroup, which gives them to Hopper's tensor
// cores and goes on.
//
// A plane is panels of 64 features, [rows][128 bytes], as ptx/wgmma.cuh describes them. A thread's numbers of a product
// are those of its warp's 16 rows, as in mma_tile.cuh, so what lies between products is the same.
//
// In scores the large products of each 16 features have sums of their own, which begin with the small ones of the same
// features; 4 chains of them are enough for 64 features, and more share these chains. Sums over the other side's rows
// begin with all small products of a step. Each large product is cut once where it is added.
#pragma once

#include "engines/cuda/kernels/split_tile.cuh"
#include "engines/cuda/ptx/tma.cuh"
#include "engines/cuda/ptx/wgmma.cuh"

namespace headway::cuda {

struct WarpgroupProducts {
  static constexpr bool by_warpgroups = true;
  static constexpr int alignment = 1024;

  template <int Rows, int Depth>
  static __device__ __forceinline__ int place(int r, int chunk) {
    return chunk / 8 * panel_bytes<Rows> + r * 128 + ((chunk % 8 ^ (r & 7)) << 4);
  }

  static __device__ __forceinline__ void planes_are_written() { ptx::shared_writes_to_async_fence(); }

  // Own rows that are not split ahead, because their planes would not fit: [rows][Depth] floats, split each time they
  // are read. Lanes that read 8 bytes each, four of a row, find four rows in different banks.
  template <int Depth>
  static __device__ __forceinline__ int float_place(int r, int chunk) {
    return r * Depth + ((chunk ^ (r & 3) << 1) << 2);
  }

  // Staged [Rows][Depth] become such rows [first, first + Rows), without what may not be split, by all threads of a
  // block; `marked` as in split_rows.
  template <int Threads, int Rows, int Depth, SplitLimits limits>
  static __device__ __forceinline__ void keep_rows(const float* staged, unsigned char* own, int first,
                                                   std::uint32_t* marked) {
    float* to = reinterpret_cast<float*>(own);
#pragma unroll 1
    for (int task = static_cast<int>(threadIdx.x); task < Rows * Depth / 8; task += Threads) {
      const int r = task / (Depth / 8), d = task % (Depth / 8) * 8;
      float eight[8];
      load_four(staged + r * Depth + d, eight);
      load_four(staged + r * Depth + d + 4, eight + 4);
      take_out<limits>(eight, r, marked);
#pragma unroll
      for (int x = 0; x < 8; x += 4) {
        store_four(to + float_place<Depth>(first + r, (d + x) / 4), eight[x], eight[x + 1], eight[x + 2], eight[x + 3]);
      }
    }
  }

 private:
  template <int OwnRows, int OtherRows, int Depth, int Features, int Chains>
  class PlaneScores {
   public:
    __device__ __forceinline__ void start(const MmaThread&, const unsigned char* own, const unsigned char* other,
                                          int from, int) {
      const std::uint64_t a = ptx::tile_descriptor(panel_of<OwnRows>(own, from), 16);
      const std::uint64_t b = ptx::tile_descriptor(panel_of<OtherRows>(other, from), 16);
      const auto multiply = [&](int k, int part_a, int part_b, bool begins) {
        Product::multiply(
            chains_[k % chains], a + in_units(part_a * OwnRows * Depth * 2 + k / 4 * panel_bytes<OwnRows>) + k % 4 * 2,
            b + in_units(part_b * OtherRows * Depth * 2 + k / 4 * panel_bytes<OtherRows>) + k % 4 * 2, begins ? 0 : 1);
      };
      ptx::wgmma_fence();
#pragma unroll
      for (int kind = 0; kind < small_kinds; ++kind) {
#pragma unroll
        for (int k = 0; k < steps; ++k) {
          multiply(k, part_of_a(kind), part_of_b(kind), kind == 0 && k < chains);
        }
      }
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        multiply(k, 0, 0, false);
      }
      ptx::wgmma_commit();
    }

    template <int Pending>
    __device__ __forceinline__ void finish(float (&products)[OtherRows / 8][4]) {
      ptx::wgmma_wait<Pending>();
      add_chains(chains_, products);
    }

   private:
    static constexpr int steps = Features / 16, chains = steps < Chains ? steps : Chains;
    using Product = ptx::Wgmma<bfloat16, OtherRows>;
    float chains_[chains][OtherRows / 2];
  };

  // The same of own rows that are not split ahead. A step's parts are made while the tensor cores have the step before.
  template <int OwnRows, int OtherRows, int Depth, int Features, int Chains>
  class FloatScores {
   public:
    __device__ __forceinline__ void start(const MmaThread& thread, const unsigned char* own, const unsigned char* other,
                                          int from, int) {
      const std::uint64_t b = ptx::tile_descriptor(panel_of<OtherRows>(other, from), 16);
      const auto* rows = reinterpret_cast<const float*>(own);
      const int r = thread.row_of(0), d = from + 2 * (thread.lane % 4);
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        std::uint32_t(&a)[split_parts][4] = parts_[k % 2];
        if (k >= 2) {
          ptx::wgmma_wait<1>();
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int at = d + k * 16 + x / 2 * 8;
          const float2 two =
              *reinterpret_cast<const float2*>(rows + float_place<Depth>(r + x % 2 * 8, at / 4) + at % 4);
          std::uint32_t parts[split_parts];
          split_pair(two.x, two.y, parts);
#pragma unroll
          for (int part = 0; part < split_parts; ++part) {
            a[part][x] = parts[part];
          }
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int kind = 0; kind <= small_kinds; ++kind) {
          const std::uint32_t(&one)[4] = a[kind < small_kinds ? part_of_a(kind) : 0];
          const int part_b = kind < small_kinds ? part_of_b(kind) : 0;
          Product::template multiply<ptx::Reduced::along_columns>(
              chains_[k % chains], one[0], one[1], one[2], one[3],
              b + in_units(part_b * OtherRows * Depth * 2 + k / 4 * panel_bytes<OtherRows>) + k % 4 * 2,
              kind == 0 && k < chains ? 0 : 1);
        }
        ptx::wgmma_commit();
      }
    }

    template <int Pending>
    __device__ __forceinline__ void finish(float (&products)[OtherRows / 8][4]) {
      ptx::wgmma_wait<0>();
      add_chains(chains_, products);
    }

   private:
    static constexpr int steps = Features / 16, chains = steps < Chains ? steps : Chains;
    using Product = ptx::Wgmma<bfloat16, OtherRows>;
    std::uint32_t parts_[2][split_parts][4];
    float chains_[chains][OtherRows / 2];
  };

 public:
  template <int OwnRows, int OtherRows, int Depth, int Features, int Chains = 4, bool Floats = false>
  using Scores = std::conditional_t<Floats, FloatScores<OwnRows, OtherRows, Depth, Features, Chains>,
                                    PlaneScores<OwnRows, OtherRows, Depth, Features, Chains>>;

  // `Together`: so many tiles of 8 columns at a time, to take fewer registers. Only the last go on after start().
  template <int OtherRows, int Depth, int Features, int Together = Features / 8>
  class Sums {
   public:
    __device__ __forceinline__ void start(const MmaThread&, const float (&p)[OtherRows / 8][4], float scale,
                                          const unsigned char* other, int from, int, float (&sums)[Features / 8][4]) {
      split_coefficients(p, scale, parts_);
#pragma unroll
      for (int tile = 0; tile < Features / 8; tile += Together) {
        if (tile > 0) {
          finish_tiles<0>(tile - Together, sums);
        }
        start_tiles(other, from + tile * 8);
      }
    }

    // `Pending` products that began later may go on.
    template <int Pending>
    __device__ __forceinline__ void finish(float (&sums)[Features / 8][4]) {
      finish_tiles<Pending>(Features / 8 - Together, sums);
    }

   private:
    static constexpr int steps = OtherRows / 16;
    using Product = ptx::Wgmma<bfloat16, Together * 8>;

    __device__ __forceinline__ void start_tiles(const unsigned char* other, int from) {
      const std::uint64_t b = ptx::tile_descriptor(panel_of<OtherRows>(other, from), panel_bytes<OtherRows>);
      const auto multiply = [&](int k, int part_a, int part_b, bool begins) {
        const std::uint32_t(&a)[4] = parts_[k][part_a];
        Product::template multiply<ptx::Reduced::along_rows>(
            step_, a[0], a[1], a[2], a[3], b + in_units(part_b * OtherRows * Depth * 2 + k * 16 * 128), begins ? 0 : 1);
      };
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < steps; ++k) {
#pragma unroll
        for (int kind = 0; kind < small_kinds; ++kind) {
          multiply(k, part_of_a(kind), part_of_b(kind), k == 0 && kind == 0);
        }
      }
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        multiply(k, 0, 0, false);
      }
      ptx::wgmma_commit();
    }

    template <int Pending>
    __device__ __forceinline__ void finish_tiles(int tile, float (&sums)[Features / 8][4]) {
      ptx::wgmma_wait<Pending>();
      ptx::touch(step_);
#pragma unroll
      for (int slot = 0; slot < Together * 4; ++slot) {
        sums[tile + slot / 4][slot % 4] += step_[slot];
      }
    }

    std::uint32_t parts_[steps][split_parts][4];
    float step_[Together * 4];
  };

 private:
  template <int Rows>
  static constexpr int panel_bytes = Rows * 128;

  template <int Chains, int Slots>
  static __device__ __forceinline__ void add_chains(float (&chains)[Chains][Slots], float (&products)[Slots / 4][4]) {
#pragma unroll
    for (int chain = 0; chain < Chains; ++chain) {
      ptx::touch(chains[chain]);
    }
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) {
      float sum = chains[0][slot];
#pragma unroll
      for (int chain = 1; chain < Chains; ++chain) {
        sum += chains[chain][slot];
      }
      products[slot / 4][slot % 4] = sum;
    }
  }

  // Of feature `from`, the first of a panel.
  template <int Rows>
  static __device__ __forceinline__ std::uint32_t panel_of(const unsigned char* planes, int from) {
    return ptx::shared_address(planes) + static_cast<std::uint32_t>(from / 64 * panel_bytes<Rows>);
  }
  static __device__ constexpr std::uint64_t in_units(int bytes) { return static_cast<std::uint64_t>(bytes >> 4); }
};

}  // namespace headway::cuda
