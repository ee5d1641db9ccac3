// The weights of a tile of the backward pass, P = 2^(S - lse): what follows from the products of queries and keys.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_tile_data.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/near_exp2.h"
#include "engines/cpu/kernel/query_factor.h"
#include "engines/cpu/kernel/score_factor.h"

namespace headway::cpu {
namespace {

template <class S>
class TileWeights {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;

 public:
  using Near = NearExp2<S, raised<S>>;
  // Whether exponentials take the short way where they can, and hide between products.
  static constexpr bool hides = LooksUpPowers<S>;

  TileWeights(const Tile<S>& tile, const ScoreFactor<Scalar>& factor_of_tile) : factor(factor_of_tile), tile_(tile) {}

  const ScoreFactor<Scalar> factor;  // from products to scores

  // Of modified scores in `weights`.
  void exponentiate(const Patch& patch) const {
    for_vectors<S>(patch, [&](int r, int at, int) HEADWAY_LAMBDA {
      S::store(tile_.weights + at, natural_weight(S::load(tile_.weights + at), r));
    });
  }
  HEADWAY_INLINE Vector natural_weight(Vector score, int row) const {
    const Vector x = (score - reference(row)) - S::set(tile_.numbers.lse[row]);
    return exp2<S, raised<S>>(not_above_0(x) * S::set(static_cast<Scalar>(log2e)));
  }

  // Of products in `weights`, for rows with references and factors beyond the type's range; any other row gets the bits
  // that it gets without them.
  HEADWAY_NOINLINE void weigh_from_references(const Patch& patch) const {
    const Vector power = S::set(factor.power);
    for_vectors<S>(patch, [&](int r, int at, int) HEADWAY_LAMBDA {
      S::store(tile_.weights + at, exponent((S::load(tile_.weights + at) - reference(r)) * power, r));
    });
    weigh_any(patch);
  }

  // Of a product of a row's. No weight is above 1, however lse was rounded.
  HEADWAY_INLINE Vector exponent(Vector product, int row) const {
    return not_above_0(S::fma(product, S::set(factor.rest), S::set(-tile_.numbers.lse[row])));
  }

  // Of exponents in `weights`: those out of the fast exponential's reach with that of any number, the others with the
  // same bits as before.
  HEADWAY_NOINLINE void weigh_any(const Patch& patch) const {
    for_vectors<S>(patch, [&](int, int at, int) HEADWAY_LAMBDA {
      const Vector x = S::load(tile_.weights + at);
      if constexpr (hides) {
        auto witness = Near::no_witness();
        const Vector near = Near::of(x, witness);
        S::store(tile_.weights + at, S::select(Near::out_of_reach(witness, near), exp2<S, raised<S>>(x), near));
      } else {
        S::store(tile_.weights + at, exp2<S, raised<S>>(x));
      }
    });
  }

 private:
  HEADWAY_INLINE static Vector not_above_0(Vector x) { return S::min(S::zero(), x); }  // NaN passes

  Vector reference(int row) const {
    return tile_.numbers.references == nullptr ? S::zero() : S::set(tile_.numbers.references[row]);
  }

  const Tile<S>& tile_;
};

}  // namespace
}  // namespace headway::cpu
