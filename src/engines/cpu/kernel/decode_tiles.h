// The two register tiles of decode, both with features in lanes: dot products of keys with queries, and weighted sums
// of values.
#pragma once

#include <cstdint>
#include <cstring>

#include "engines/cpu/kernel/lane_sums.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/score_factor.h"
#include "engines/cpu/kernel/stored_rows.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// Where the rows of keys are: to be streamed from memory, or in a cache, since other queries were multiplied by them.
enum class KeysIn : bool { memory, cache };

// How many keys are processed together, and how many vectors of each at once. Four at a time save most loads of queries
// and have enough sums under way to hide the latency of an FMA. But memory streams best in whole rows, one after the
// other: two rows of floats at a time halved its speed, and only shorter types, whose rows are shorter, may come in
// fours.
template <class S, class In, int NR, KeysIn place>
struct KeyTile {
  static constexpr int wanted = NR > 1 && (sizeof(In) <= 2 || place == KeysIn::cache) ? 4 : 1;
  static constexpr int together = wanted < S::lanes / NR ? wanted : S::lanes / NR;
  static constexpr int vectors = together == 1 ? 8 : 1;
};

// The widest head for which a lane adds up all its products one by one.
template <class S, class In>
constexpr std::int64_t longest_dot_chain = 16 * DotOperand<S, In>::size;

// products[r * NK + k] holds the products of query r and key k, still to be summed over lanes, for NR queries and
// `together` keys. Only columns [begin, end), whose sums are added to those of the columns before.
template <class S, class In, int NR, int NK, int together, int vectors>
HEADWAY_INLINE void dot_keys(const typename Operands<S>::Scalar* queries, std::int64_t query_ld,
                             const KeyRow<S, In> (&keys)[together], std::int64_t begin, std::int64_t end,
                             typename S::Vector* products) {
  using Dot = DotOperand<S, In>;
  using Operand = Operands<S>;
  typename S::Vector acc[NR][together];
  HEADWAY_UNROLL
  for (int r = 0; r < NR; ++r) {
    HEADWAY_UNROLL
    for (int n = 0; n < together; ++n) {
      acc[r][n] = S::zero();
    }
  }
  const auto strip = [&]<int NV>(Strip<NV>, std::int64_t d, const auto& load) HEADWAY_LAMBDA {
    typename Operand::Vector x[together][NV];
    HEADWAY_UNROLL
    for (int n = 0; n < together; ++n) {
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        x[n][v] = load(keys[n], d + v * Dot::size);
      }
    }
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      HEADWAY_UNROLL
      for (int r = 0; r < NR; ++r) {
        const typename Operand::Vector q = Operand::load(queries + r * query_ld + d / Operand::fold + v * S::lanes);
        HEADWAY_UNROLL
        for (int n = 0; n < together; ++n) {
          acc[r][n] = Operand::multiply_add(q, x[n][v], acc[r][n]);
        }
      }
    }
  };
  const auto whole = [](const KeyRow<S, In>& key, std::int64_t at) HEADWAY_LAMBDA { return key.load(at); };
  std::int64_t d = begin;
  for (; d + vectors * Dot::size <= end; d += vectors * Dot::size) {
    strip(Strip<vectors>{}, d, whole);
  }
  for (; d + Dot::size <= end; d += Dot::size) {
    strip(Strip<1>{}, d, whole);
  }
  if (d < end) {
    const int count = static_cast<int>(end - d);
    strip(Strip<1>{}, d,
          [count](const KeyRow<S, In>& key, std::int64_t at) HEADWAY_LAMBDA { return key.load_part(at, count); });
  }
  HEADWAY_UNROLL
  for (int r = 0; r < NR; ++r) {
    HEADWAY_UNROLL
    for (int n = 0; n < together; ++n) {
      products[r * NK + n] = begin == 0 ? acc[r][n] : products[r * NK + n] + acc[r][n];
    }
  }
}

// scores[r][k] = factor * <query r, key k> for NR queries and `lanes` keys; past the key `last` it repeats. NR * NK
// vectors of products make one of sums. `in_chains`: a head is wider than longest_dot_chain.
// fetch(k, n) is called before the keys k to k + n.
template <class S, class In, int NR, bool in_chains, KeysIn place, class Fetch>
HEADWAY_INLINE void dot_tile(const typename Operands<S>::Scalar* queries, std::int64_t query_ld, StoredRows<In> keys,
                             std::int64_t last, std::int64_t dim, const Scaling<S>& factor, typename S::Scalar* scores,
                             std::int64_t score_ld, const Fetch& fetch) {
  constexpr int NK = S::lanes / NR;
  using Tile = KeyTile<S, In, NR, place>;
  constexpr int together = Tile::together, vectors = Tile::vectors;
  for (int part = 0; part < NR; ++part) {
    typename S::Vector products[S::lanes];
    const auto some_keys = [&](int k) HEADWAY_LAMBDA {
      fetch(part * NK + k, together);
      KeyRow<S, In> rows[together];
      HEADWAY_UNROLL
      for (int n = 0; n < together; ++n) {
        rows[n] = KeyRow<S, In>(keys, smaller(part * NK + k + n, last));
      }
      constexpr std::int64_t longest = longest_dot_chain<S, In>;
      dot_keys<S, In, NR, NK, together, vectors>(queries, query_ld, rows, 0, in_chains ? longest : dim, products + k);
      for (std::int64_t d = longest; in_chains && d < dim; d += longest) {
        dot_keys<S, In, NR, NK, together, vectors>(queries, query_ld, rows, d, smaller(dim, d + longest), products + k);
      }
    };
    if constexpr (NR == 4) {
      HEADWAY_UNROLL
      for (int k = 0; k < NK; k += together) {
        some_keys(k);
      }
    } else {
      _Pragma("GCC unroll 1") for (int k = 0; k < NK; k += together) { some_keys(k); }
    }
    alignas(64) typename S::Scalar sums[S::lanes];
    S::store(sums, factor(lane_sums<S>(products)));
    HEADWAY_UNROLL
    for (int r = 0; r < NR; ++r) {
      std::memcpy(scores + r * score_ld + part * NK, sums + r * NK, NK * sizeof(typename S::Scalar));
    }
  }
}

// The destination of a tile of sums: the first tile of a part overwrites it.
enum class Sum : bool { starts, continues };

// acc[r][v] += sum over k of weights[r][k] * values[k][d], for NR rows and NV vectors of d. `count` elements exist in
// the last, all of them where NV is even.
template <class S, class In, int NR, int NV, class Fetch>
HEADWAY_INLINE void add_weighted(typename S::Vector (&acc)[NR][NV], const typename S::Scalar* weights,
                                 std::int64_t weight_ld, StoredRows<In> values, std::int64_t keys, int count,
                                 const Fetch& fetch) {
  using Vector = typename S::Vector;
  constexpr bool alternates = requires(Vector & x) { S::load_alternating(values.data, x, x); };
  constexpr int in_pairs = alternates ? NV / 2 * 2 : 0;
  for (std::int64_t k = 0; k < keys; ++k) {
    fetch(k, 1);
    Vector p[NR];
    HEADWAY_UNROLL
    for (int r = 0; r < NR; ++r) {
      p[r] = S::set(weights[r * weight_ld + k]);
    }
    const In* const row = values.data + k * values.ld;
    if constexpr (alternates) {
      HEADWAY_UNROLL
      for (int v = 0; v < in_pairs; v += 2) {
        Vector even, odd;
        S::load_alternating(row + v * S::lanes, even, odd);
        HEADWAY_UNROLL
        for (int r = 0; r < NR; ++r) {
          acc[r][v] = S::fma(p[r], even, acc[r][v]);
          acc[r][v + 1] = S::fma(p[r], odd, acc[r][v + 1]);
        }
      }
    }
    HEADWAY_UNROLL
    for (int v = in_pairs; v < NV; ++v) {
      const bool last = NV % 2 == 1 && v == NV - 1;
      const Vector x = values.template scaled_part<S>(k, S::load_first(row + v * S::lanes, last ? count : S::lanes));
      HEADWAY_UNROLL
      for (int r = 0; r < NR; ++r) {
        acc[r][v] = S::fma(p[r], x, acc[r][v]);
      }
    }
  }
  if constexpr (alternates) {
    HEADWAY_UNROLL
    for (int r = 0; r < NR; ++r) {
      HEADWAY_UNROLL
      for (int v = 0; v < in_pairs; v += 2) {
        S::merge_alternating(acc[r][v], acc[r][v + 1]);
      }
    }
  }
}

// output[r][d] (+)= sum over k of weights[r][k] * values[k][d].
template <class S, class In, int NR, int NV, class Fetch>
HEADWAY_INLINE void value_tile(const typename S::Scalar* weights, std::int64_t weight_ld, StoredRows<In> values,
                               std::int64_t keys, int count, typename S::Scalar* output, std::int64_t output_ld,
                               Sum sum, const Fetch& fetch) {
  typename S::Vector acc[NR][NV];
  HEADWAY_UNROLL
  for (int r = 0; r < NR; ++r) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      acc[r][v] = S::zero();
    }
  }
  add_weighted<S, In, NR, NV>(acc, weights, weight_ld, values, keys, count, fetch);
  HEADWAY_UNROLL
  for (int r = 0; r < NR; ++r) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      typename S::Scalar* at = output + r * output_ld + v * S::lanes;
      S::store(at, sum == Sum::starts ? acc[r][v] : S::load(at) + acc[r][v]);
    }
  }
}

}  // namespace
}  // namespace headway::cpu
