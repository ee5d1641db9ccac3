// Fused softmax over tiles: the scores of 32 keys at a time go through the first-level cache, and their exponentials
// run between the products of the next 32.
//
// Two vectors of queries go together: 2 x 2 tiles of sums. Their weights for `weighed_keys` keys, 16 KB, stay in the
// first-level cache until they meet V; K and V stream by from the second-level cache, O is visited once for them.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/forward_tiny.h"
#include "engines/cpu/kernel/tile_exp2.h"
#include "engines/cpu/kernel/tile_products.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t weighed_keys = 256;

// The next head's rows, a row of each matrix beside each product. Long sequences stay with their head for so long that
// it does not matter.
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

template <class S, class In>
class ForwardTiles : public ForwardTiny<S, In> {
 protected:
  using Base = ForwardTiny<S, In>;
  using Base::args_;
  using Base::at_;
  using Base::Base;
  using Base::keys_;
  using Base::lanes;
  using Base::scores_at;
  using Base::to_log2_;
  using Base::width;
  using typename Base::Operand;
  using typename Base::Scalar;
  using typename Base::Vector;

  // Before the first panel.
  void look_ahead() {
    if (args_.ranges.keys <= HeadAhead::most_keys) {
      ahead_.key = ahead_of<In>(args_.next_key, args_.key.rows, args_.ranges.keys, args_.head_dim);
      ahead_.value = ahead_of<In>(args_.next_value, args_.value.rows, args_.ranges.keys, args_.value_dim);
      ahead_.query = ahead_of<In>(args_.next_query, args_.query, args_.row_end - args_.row_begin, args_.head_dim);
      ahead_.rows = larger(ahead_.key.rows, ahead_.query.rows);
    }
  }

  // References for rows that have none yet: the highest of their scores with a few keys.
  template <int NV>
  HEADWAY_NOINLINE void first_references(std::int64_t p, const Range& piece) {
    Vector highest[NV];
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      highest[n] = S::set(-Base::infinity);
    }
    this->template raw_scores<NV>(p, 0, piece);
    this->template raise_to_scores<NV>(0, piece, highest);
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      Scalar* at = at_.references + p * width + n * lanes;
      const auto missing = S::equal(S::load(at), S::set(-Base::infinity));
      S::store(at, S::select(missing, highest[n], S::load(at)));
    }
  }

  // A piece of whole tiles of keys, inside every row's range, against references that exist, for NV vectors from v on:
  // weights, sums and output. Returns false, with nothing changed, where a weight is out of reach.
  template <int NV>
  HEADWAY_NOINLINE bool fused_by_tiles(std::int64_t p, int v, const Range& piece) {
    const std::int64_t steps = folded<S>(args_.head_dim) / tile_pairs;
    const std::int64_t products = larger(1, steps * 2 * NV);  // of a chunk
    const int apart = static_cast<int>((chunk_pairs + products - 1) / products);
    Weighing<NV> weighing(*this, p, v, piece);
    alignas(64) Scalar raw[2][tile_steps * NV * lanes];
    const TileRows<const std::uint32_t> queries{this->query_panel(p) + v * lanes, width, lanes};
    HeadAhead ahead = ahead_;
    const auto beside = [&]() HEADWAY_LAMBDA {
      ahead.fetch();
      weighing.some(apart);
    };
    int side = 0;
    for (std::int64_t key = piece.begin; key < piece.end; key += tile_steps, side ^= 1) {
      const TileRows<const std::uint32_t> keys{this->key_operands(key), keys_.ld, tile_side * keys_.ld};
      const TileRows<Scalar> sums{raw[side], NV * lanes, tile_side * NV * lanes};
      Block<NV>::clear();
      Block<NV>::multiply(keys, queries, steps, beside);
      weighing.rest();
      Block<NV>::store(sums);
      weighing.begin(raw[side]);
    }
    weighing.rest();
    ahead_.done = ahead.done;
    Vector decay[NV], totals[NV];
    bool in_reach = true;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      decay[n] = S::set(1);
      totals[n] = weighing.sum[n].total();
      in_reach &= !S::any(Exp::out_of_reach({}, totals[n]));
    }
    if (!in_reach) {
      return false;
    }
    this->template add_sums<NV>(p, v, decay, totals);
    this->template add_values<NV>(
        p, v, piece, decay,
        this->keeps_scalars() ? this->template weight_operands<NV>(p, v, piece) : this->operands_at(piece.begin, v));
    return true;
  }

 private:
  HeadAhead ahead_;

  using Exp = TileExp2<S>;
  static constexpr int chunk_pairs = tile_pairs;
  template <int NV>
  using Block = TileBlock<S, 2, NV>;

  // The weights of one chunk of 32 keys after another, a pair of keys at a time.
  template <int NV>
  struct Weighing {
    Weighing(const ForwardTiles& forward, std::int64_t p, int v, const Range& piece)
        : to_log2(S::set(static_cast<Scalar>(forward.to_log2_))),
          pairs(forward.operands_at(piece.begin, v)),
          scalars(forward.keeps_scalars() ? forward.scores_at(piece.begin, v) : nullptr) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        addend[n] = Exp::addend(S::load(forward.at_.references + p * width + (v + n) * lanes), to_log2);
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
          Operands<S>::store(pairs + n * Base::pairs_of_vector, Operands<S>::pairs(first, second));
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
};

}  // namespace
}  // namespace headway::cpu
