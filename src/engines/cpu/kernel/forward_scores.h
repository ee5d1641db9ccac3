// The scores of a forward task: products of queries and keys, their modifiers, and -inf for forbidden pairs.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_permission.h"
#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tile_products.h"

namespace headway::cpu {
namespace {

template <class S>
class ForwardScores {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Operand = typename Operands<S>::Scalar;
  static constexpr int lanes = S::lanes, width = ForwardSizes<S>::width;

 public:
  ForwardScores(const ForwardTask<S>& task, const ForwardBlock<S>& block)
      : permission(task), task_(task), block_(block), args_(task.args), modifier_(args_.modifiers, args_.ranges) {}

  ForwardPermission<S> permission;

  // S^T = K Q^T for NV vectors from vector v on.
  template <int NV>
  HEADWAY_NOINLINE void products(std::int64_t p, int v, const Range& piece) {
    constexpr int NB = broadcasts<S, NV>();
    const Operand* queries = task_.query_panel(p) + v * lanes;
    const Operand* keys = block_.key_operands(piece.begin);
    Scalar* scores = block_.scores_at(piece.begin, v);
    const std::int64_t count = piece.end - piece.begin;
    const std::int64_t row = task_.panel_row(p) + v * lanes;
    RowsToCome to_come(args_.modifiers, row, at_most(args_.row_end - row, NV * lanes), piece);
    if constexpr (HasTiles<S>) {
      to_come.fetch(NV * lanes);
      scores_by_tiles<S, NV>({keys, block_.keys.ld}, count, queries, width, folded<S>(args_.head_dim) / tile_pairs,
                             scores);
      if (task_.rescales()) {
        rescale<NV>(scores, count);
      }
    } else {
      const int rows_a_tile = static_cast<int>(NV * lanes * NB / (count + 1)) + 1;
      std::int64_t j = 0;
      for (; j + NB <= count; j += NB) {
        to_come.fetch(rows_a_tile);
        score_tile<NV, NB>(queries, keys + j * block_.keys.ld, scores + j * width);
      }
      for (; j < count; ++j) {
        score_tile<NV, 1>(queries, keys + j * block_.keys.ld, scores + j * width);
      }
    }
  }

  template <int NV, int NB>
  HEADWAY_INLINE void score_tile(const Operand* queries, const Operand* keys, Scalar* scores) {
    Accumulators<S, NV, NB> acc;
    multiply<NV, NB>(acc, queries, keys);
    const Vector unit = S::set(task_.score_unit.first), second = S::set(task_.score_unit.second);
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        S::store(scores + c * width + n * lanes, acc[c][n] * unit * second);
      }
    }
  }

  // Products in registers.
  template <int NV, int NB>
  HEADWAY_INLINE void multiply(Accumulators<S, NV, NB>& acc, const Operand* queries, const Operand* keys) {
    add_in_parts<S, NV, NB>(acc, folded<S>(args_.head_dim), product_chain<S>(args_.head_dim),
                            [&](std::int64_t begin, std::int64_t count) HEADWAY_LAMBDA {
                              accumulate<S, NV, NB, Scalars::across>(acc, queries + begin * width, width, keys + begin,
                                                                     block_.keys.ld, count);
                            });
  }

  // A piece without the chunks at its end that the mask or the bias forbids to every row, as behind the end of a padded
  // sequence. Their weights of 0 would add nothing to any sum; as an output they are wanted.
  template <int NV>
  HEADWAY_NOINLINE Range without_forbidden_end(std::int64_t p, int v, const Range& piece) const {
    if ((args_.modifiers.mask.data == nullptr && args_.modifiers.bias.data == nullptr) ||
        args_.weights.data != nullptr) {
      return piece;
    }
    const std::int64_t row = task_.panel_row(p) + v * lanes;
    const int rows = at_most(args_.row_end - row, NV * lanes);
    std::int64_t end = piece.end;
    while (end > piece.begin) {
      const std::int64_t chunk = piece.begin + (end - piece.begin - 1) / chunk_keys * chunk_keys;
      if (!forbid_all<S>(args_.modifiers, {row, rows, chunk, static_cast<int>(end - chunk)})) {
        break;
      }
      end = chunk;
    }
    return {piece.begin, end};
  }

  HEADWAY_NOINLINE void modify(std::int64_t p, int v, int vectors, const Range& piece) {
    MaskBits bits;
    const std::int64_t row = task_.panel_row(p) + v * lanes;
    const int rows = at_most(args_.row_end - row, vectors * lanes);
    for (std::int64_t key = piece.begin; key < piece.end; key += chunk_keys) {
      const int keys = at_most(piece.end - key, chunk_keys);
      if (args_.modifiers.mask.data != nullptr) {
        load_mask_bits<S>(args_.modifiers.mask, {row, rows, key, keys}, bits);
      }
      for (int n = 0; n < vectors; ++n) {
        const ChunkPlace place{row + n * lanes, at_most(larger(rows - n * lanes, 0), lanes), key, keys};
        modifier_.apply(block_.scores_at(piece.begin, v + n) + (key - piece.begin) * width, width, place, bits,
                        n * lanes);
      }
    }
  }

  // Scores of a vector's rows outside their ranges and spans become -inf.
  HEADWAY_NOINLINE void forbid_outside(std::int64_t p, int v, const Range& piece) {
    if (!task_.at.panel_ranges[p].scattered) {
      forbid_outside_ranges<S>(block_.scores_at(piece.begin, v), width, task_.at.ranges + p * width + v * lanes,
                               piece.begin, piece.end - piece.begin);
      return;
    }
    const Vector forbidden = S::set(-infinity<S>);
    for (std::int64_t key = piece.begin; key < piece.end; ++key) {
      const TileBits<S>& bits = permission.tile(p, key);
      const auto allowed = S::mask_from_bits(bits.rows[key - bits.key_begin] >> (v * lanes));
      Scalar* at = block_.scores_at(piece.begin, v) + (key - piece.begin) * width;
      S::store(at, S::select(allowed, S::load(at), forbidden));
    }
  }

 private:
  // Products become scores.
  template <int NV>
  void rescale(Scalar* products, std::int64_t count) {
    const Vector unit = S::set(task_.score_unit.first), second = S::set(task_.score_unit.second);
    for (std::int64_t j = 0; j < count; ++j) {
      for (int n = 0; n < NV; ++n) {
        Scalar* at = products + j * width + n * lanes;
        S::store(at, S::load(at) * unit * second);
      }
    }
  }

  const ForwardTask<S>& task_;
  const ForwardBlock<S>& block_;
  const ForwardArgs& args_;
  ScoreModifier<S> modifier_;
};

}  // namespace
}  // namespace headway::cpu
