// Fused softmax over tiles: the scores of 32 keys at a time go through the first-level cache, and their exponentials
// run between the products of the next 32.
//
// Two vectors of queries go together: 2 x 2 tiles of sums. Their weights for `weighed_keys` keys, 16 KB, stay in the
// first-level cache until they are multiplied by V; K and V are streamed from the second-level cache, O is visited
// once.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_softmax.h"
#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/forward_values.h"
#include "engines/cpu/kernel/key_sums.h"
#include "engines/cpu/kernel/tile_exp2.h"
#include "engines/cpu/kernel/tile_products.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t weighed_keys = 256;

// Prefetches the next head's rows, a row of each matrix with each product. For long sequences, which spend long on each
// head, it does not matter.
struct HeadAhead {
  static constexpr std::int64_t most_keys = 512;
  Ahead query, key, value;
  std::int64_t rows = 0, done = 0;

  HEADWAY_INLINE void fetch() {
    if (done < rows) {
      query.fetch<2>(done, 1);
      key.fetch<2>(done, 1);
      value.fetch<2>(done, 1);
      ++done;
    }
  }
};

template <class S>
class ForwardTiles {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Operand = typename Operands<S>::Scalar;
  static constexpr int lanes = S::lanes, width = ForwardSizes<S>::width;

 public:
  ForwardTiles(const ForwardTask<S>& task, const ForwardBlock<S>& block, ForwardValues<S>& values,
               ForwardSoftmax<S>& softmax)
      : task_(task), block_(block), args_(task.args), values_(values), softmax_(softmax) {}

  // Before the first panel, of matrices of In.
  template <class In>
  void look_ahead() {
    if (args_.ranges.keys <= HeadAhead::most_keys) {
      ahead_.key = ahead_of<In>(args_.next_key, args_.key.rows, args_.ranges.keys, args_.head_dim);
      ahead_.value = ahead_of<In>(args_.next_value, args_.value.rows, args_.ranges.keys, args_.value_dim);
      ahead_.query = ahead_of<In>(args_.next_query, args_.query, args_.row_end - args_.row_begin, args_.head_dim);
      ahead_.rows = larger(ahead_.key.rows, ahead_.query.rows);
    }
  }

  // By tiles, two vectors at a time.
  template <int NV>
  void run(std::int64_t p, const Range& piece) {
    for (std::int64_t key = piece.begin; key < piece.end; key += weighed_keys) {
      const Range part{key, smaller(key + weighed_keys, piece.end)};
      for (int v = 0; v + 2 <= NV; v += 2) {
        if (!piece_of<2>(p, v, part)) {
          softmax_.template raise_references<2, TileExp2<S>>(p, v, part);
        }
      }
      if constexpr (NV % 2 == 1) {
        if (!piece_of<1>(p, NV - 1, part)) {
          softmax_.template raise_references<1, TileExp2<S>>(p, NV - 1, part);
        }
      }
    }
  }

 private:
  // A piece of whole tiles of keys, inside every row's range, against references that exist, for NV vectors from v on:
  // weights, sums and output. Returns false, with nothing changed, where a weight is out of reach.
  template <int NV>
  HEADWAY_NOINLINE bool piece_of(std::int64_t p, int v, const Range& piece) {
    const std::int64_t steps = folded<S>(args_.head_dim) / tile_pairs;
    const std::int64_t products = larger(1, steps * 2 * NV);  // of a chunk
    const int apart = static_cast<int>((chunk_pairs + products - 1) / products);
    Weighing<NV> weighing(*this, p, v, piece);
    alignas(64) Scalar raw[2][tile_steps * NV * lanes];
    const TileRows<const std::uint32_t> queries{task_.query_panel(p) + v * lanes, width, lanes};
    HeadAhead ahead = ahead_;
    const auto beside = [&]() HEADWAY_LAMBDA {
      ahead.fetch();
      weighing.some(apart);
    };
    int side = 0;
    for (std::int64_t key = piece.begin; key < piece.end; key += tile_steps, side ^= 1) {
      const TileRows<const std::uint32_t> keys{block_.key_operands(key), block_.keys.ld, tile_side * block_.keys.ld};
      const TileRows<Scalar> sums{raw[side], NV * lanes, tile_side * NV * lanes};
      Block<NV>::clear();
      Block<NV>::multiply(keys, queries, steps, beside);
      weighing.rest();
      Block<NV>::store(sums);
      weighing.begin(raw[side]);
    }
    weighing.rest();
    ahead_.done = ahead.done;
    Vector kept[NV], totals[NV];
    bool in_reach = true;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      kept[n] = S::set(1);
      totals[n] = weighing.sum[n].total();
      in_reach &= !S::any(Exp::out_of_reach({}, totals[n]));
    }
    if (!in_reach) {
      return false;
    }
    softmax_.template add_sums<NV>(p, v, kept, totals);
    values_.template add<NV>(p, v, piece, kept,
                             values_.keeps_scalars() ? values_.template weight_operands<NV>(p, v, piece)
                                                     : values_.operands_at(piece.begin, v));
    return true;
  }

  using Exp = TileExp2<S>;
  static constexpr int chunk_pairs = tile_pairs;
  template <int NV>
  using Block = TileBlock<S, 2, NV>;

  // The weights of one chunk of 32 keys after another, a pair of keys at a time.
  template <int NV>
  struct Weighing {
    Weighing(const ForwardTiles& part, std::int64_t p, int v, const Range& piece)
        : to_log2(S::set(static_cast<Scalar>(part.task_.to_log2))),
          pairs(part.values_.operands_at(piece.begin, v)),
          scalars(part.values_.keeps_scalars() ? part.block_.scores_at(piece.begin, v) : nullptr) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        addend[n] = Exp::addend(S::load(part.task_.at.references + p * width + (v + n) * lanes), to_log2);
      }
    }
    HEADWAY_INLINE void begin(const Scalar* scores) {
      raw = scores;
      left = chunk_pairs;
    }
    HEADWAY_INLINE void some(int count) {
      for (int k = 0; k < count && left > 0; ++k) {
        pair();
      }
    }
    HEADWAY_INLINE void rest() {
      while (left > 0) {
        pair();
      }
    }

    Vector to_log2, addend[NV];
    WeightSum<S> sum[NV];

   private:
    HEADWAY_INLINE void pair() {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        const Vector first = weight(raw + n * lanes, n);
        const Vector second = weight(raw + (NV + n) * lanes, n);
        if (scalars == nullptr) {
          Operands<S>::store(pairs + n * ForwardSizes<S>::pairs_of_vector, Operands<S>::pairs(first, second));
        } else {
          S::store(scalars + n * lanes, first);
          S::store(scalars + width + n * lanes, second);
        }
      }
      raw += 2 * NV * lanes;
      pairs += lanes;
      scalars = scalars == nullptr ? nullptr : scalars + 2 * width;
      --left;
      done += 2;
      if (done % summed_weights == 0) {
        HEADWAY_UNROLL
        for (int n = 0; n < NV; ++n) {
          sum[n].end_part();
        }
      }
    }
    HEADWAY_INLINE Vector weight(const Scalar* score, int n) {
      typename Exp::Witness witness;
      const Vector result = Exp::of(S::fma(S::load(score), to_log2, addend[n]), witness);
      sum[n].add(result);
      return result;
    }

    const Scalar* raw = nullptr;
    Operand* pairs;
    Scalar* scalars;  // where weights are kept as scalars, else null
    int left = 0;
    std::int64_t done = 0;
  };

  const ForwardTask<S>& task_;
  const ForwardBlock<S>& block_;
  const ForwardArgs& args_;
  ForwardValues<S>& values_;
  ForwardSoftmax<S>& softmax_;
  HeadAhead ahead_;
};

}  // namespace
}  // namespace headway::cpu
