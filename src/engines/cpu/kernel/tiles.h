// Products of bf16 matrices by tile registers.
//
//   sum [16 rows][16 columns] += a [16 rows][32 steps] * b [16 pairs of steps][16 columns]
//
// A block is up to 2 x 2 sums, so that each tile that is loaded serves two products. `a` is read in rows (K as it
// lies, V transposed), `b` in pairs of steps (the panels of Q and P). What is streamed is `a`: it passes by the
// first-level cache, which holds `b`.
#pragma once

#include <cstdint>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

template <class S>
concept HasTiles = requires {
  typename S::Tiles;
};

constexpr int tile_side = 16;   // of a sum, and its columns
constexpr int tile_steps = 32;  // that one product adds up
constexpr int tile_pairs = tile_steps / 2;

// In elements of 4 bytes: pairs of bf16 in operands, floats in sums.
template <class Element>
struct TileRows {
  Element* data;
  std::int64_t ld;    // from a row to the next
  std::int64_t next;  // from a tile to the next one of the block

  Element* tile(int n) const { return data + n * next; }
  std::int64_t stride() const { return ld * 4; }
};

struct NothingBeside {
  HEADWAY_INLINE void operator()() const {}
};

template <class S, int RT, int CT>
struct TileBlock {
  using Tiles = typename S::Tiles;
  static_assert(RT <= 2 && CT <= 2);
  static constexpr int first_a = 4, first_b = 6;

  HEADWAY_INLINE static void clear() {
    each([]<int sum>(int, int) HEADWAY_LAMBDA { Tiles::template zero<sum>(); });
  }
  template <class Float>
  HEADWAY_INLINE static void load(const TileRows<Float>& sums) {
    each([&]<int sum>(int r, int c)
             HEADWAY_LAMBDA { Tiles::template load<sum>(sums.tile(r) + c * tile_side, sums.stride()); });
  }
  template <class Float>
  HEADWAY_INLINE static void store(const TileRows<Float>& sums) {
    each([&]<int sum>(int r, int c)
             HEADWAY_LAMBDA { Tiles::template store<sum>(sums.tile(r) + c * tile_side, sums.stride()); });
  }

  // sums += a b over `steps` tiles of steps; beside() is called after each product, for work that hides behind it.
  template <class Operand, class Beside = NothingBeside>
  HEADWAY_INLINE static void multiply(TileRows<const Operand> a, TileRows<const Operand> b, std::int64_t steps,
                                      Beside&& beside = {}) {
    for (std::int64_t step = 0; step < steps; ++step) {
      Tiles::template load_passing<first_a>(a.tile(0), a.stride());
      Tiles::template load<first_b>(b.tile(0), b.stride());
      product<0, 0>(beside);
      if constexpr (CT == 2) {
        Tiles::template load<first_b + 1>(b.tile(1), b.stride());
        product<0, 1>(beside);
      }
      if constexpr (RT == 2) {
        Tiles::template load_passing<first_a + 1>(a.tile(1), a.stride());
        product<1, 0>(beside);
      }
      if constexpr (RT == 2 && CT == 2) {
        product<1, 1>(beside);
      }
      a.data += tile_pairs;
      b.data += tile_pairs * b.ld;
    }
  }

 private:
  template <int r, int c, class Beside>
  HEADWAY_INLINE static void product(Beside& beside) {
    Tiles::template multiply_add<r * CT + c, first_a + r, first_b + c>();
    beside();
  }

  template <class Body>
  HEADWAY_INLINE static void each(const Body& body) {
    body.template operator()<0>(0, 0);
    if constexpr (CT == 2) {
      body.template operator()<1>(0, 1);
    }
    if constexpr (RT == 2) {
      body.template operator()<CT>(1, 0);
    }
    if constexpr (RT == 2 && CT == 2) {
      body.template operator()<3>(1, 1);
    }
  }
};

}  // namespace
}  // namespace headway::cpu
