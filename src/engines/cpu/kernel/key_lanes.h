// Pairs of one query and a panel of up to 64 keys, keys in lanes: which are allowed, which dropout keeps, and how
// modifiers change their scores. A set of pairs is a word: bit l is the panel's key l.
#pragma once

#include <cstdint>
#include <cstring>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/dropout.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/store_as.h"
#include "engines/cpu/kernel/tanh.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// Bit 4 c is bit c of a number of 16 bits.
HEADWAY_INLINE std::uint64_t every_fourth_bit(std::uint64_t bits) {
  bits = (bits | bits << 24) & 0x000000ff000000ffULL;
  bits = (bits | bits << 12) & 0x000f000f000f000fULL;
  bits = (bits | bits << 6) & 0x0303030303030303ULL;
  return (bits | bits << 3) & 0x1111111111111111ULL;
}

// The pairs that dropout keeps, of keys from a multiple of four on; both count over the whole call. A Philox call
// decides about four keys, so its lanes are every fourth key.
template <class S>
HEADWAY_NOINLINE std::uint64_t kept_groups(const DropoutRule& rule, std::int64_t row, std::int64_t key_begin,
                                           int keys) {
  std::uint64_t kept[4] = {};
  const PhiloxKeys round_keys(rule.seed);
  for (int call = 0; 4 * call < keys; call += S::word_lanes) {
    const auto counter =
        philox<S>(round_keys, {{S::consecutive_words(static_cast<std::uint64_t>((key_begin >> 2) + call)),
                                S::words(static_cast<std::uint32_t>(row)), S::words(rule.head), S::words(rule.batch)}});
    HEADWAY_UNROLL
    for (int k = 0; k < 4; ++k) {
      kept[k] |= S::low_words_at_least(counter.word[k], rule.threshold) << call;
    }
  }
  std::uint64_t word = 0;
  HEADWAY_UNROLL
  for (int k = 0; k < 4; ++k) {
    word |= every_fourth_bit(kept[k]) << k;
  }
  return word;
}

// The same for at most 64 keys of this call, from any one on.
template <class S>
HEADWAY_INLINE std::uint64_t kept_word(const DropoutRule& rule, std::int64_t row, std::int64_t key_begin, int keys) {
  const std::int64_t first = rule.first_key + key_begin;
  const auto inside = static_cast<int>(first & 3);
  const std::uint64_t kept = kept_groups<S>(rule, rule.first_row + row, first - inside, keys);
  if (inside == 0) {
    return kept;
  }
  // A part of a longer call may begin inside a group of four.
  const int whole = (keys + 3) & ~3;
  return kept >> inside | kept_groups<S>(rule, rule.first_row + row, first - inside + whole, 4) << (whole - inside);
}

// Rows [row_begin, row_end) of a tile and the vectors [vector_begin, vector_end) of its panel.
struct Patch {
  int row_begin, row_end;
  int vector_begin, vector_end;
};

// Whether scores are modified before their exponential; a mask counts, so that it gives the bits of a bias of -inf.
// Such scores and their lse are natural, so that the lowest number of a type as a bias stays finite; others are in
// units of log2.
HEADWAY_INLINE bool change_scores(const Modifiers& modifiers) { return modifiers.any; }

// Modifies scores of a patch of a tile, [rows][width], in the contract's order. The tile's first pair is `place`'s.
template <class S>
class KeyLaneModifier {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;

  KeyLaneModifier(const Modifiers& modifiers, const RangeRule& ranges) : modifiers_(modifiers), ranges_(ranges) {}

  // `slopes` takes the softcap's derivatives; `allowed` loses the pairs that a bias of -inf forbids.
  HEADWAY_NOINLINE void apply(const ChunkPlace& place, const Patch& patch, Scalar* scores, Scalar* slopes,
                              std::uint64_t* allowed) const {
    if (modifiers_.softcap != 0) {
      cap(patch, scores, slopes);
    }
    if (modifiers_.has_alibi) {
      add_alibi(place, patch, scores);
    }
    if (modifiers_.bias.data != nullptr) {  // behind ALiBi, since a bias of -inf forbids whatever the score is
      with_storage(modifiers_.bias_storage, [&]<class In>(In*) { add_bias<In>(place, patch, scores, allowed); });
    }
  }

 private:
  void cap(const Patch& patch, Scalar* scores, Scalar* slopes) const {
    const Vector factor = S::set(static_cast<Scalar>(modifiers_.softcap));
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      for (int v = patch.vector_begin; v < patch.vector_end; ++v) {
        const auto capped = tanh_and_slope<S>(S::load(scores + r * width + v * lanes));
        S::store(scores + r * width + v * lanes, factor * capped.value);
        S::store(slopes + r * width + v * lanes, capped.slope);
      }
    }
  }

  template <class In>
  void add_bias(const ChunkPlace& place, const Patch& patch, Scalar* scores, std::uint64_t* allowed) const {
    const Matrix& bias = modifiers_.bias;
    const In* first = static_cast<const In*>(bias.data) + place.row_begin * bias.row_stride;
    const Vector forbidden = S::set(-static_cast<Scalar>(__builtin_inff()));
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      for (int v = patch.vector_begin; v < patch.vector_end; ++v) {
        const int count = at_most(place.keys - v * lanes, lanes);
        const Vector x =
            load_row<S>(first + r * bias.row_stride, bias.column_stride, place.key_begin + v * lanes, count);
        Scalar* at = scores + r * width + v * lanes;
        S::store(at, biased<S>(S::load(at), x, 1));
        if (S::any(S::equal(x, forbidden))) {
          allowed[r] &= ~(minus_infinities(x) << (v * lanes));
        }
      }
    }
  }

  static HEADWAY_INLINE std::uint64_t minus_infinities(Vector x) {
    alignas(64) Scalar elements[lanes];
    S::store(elements, x);
    std::uint64_t found = 0;
    for (int l = 0; l < lanes; ++l) {
      found |= static_cast<std::uint64_t>(elements[l] == -static_cast<Scalar>(__builtin_inff())) << l;
    }
    return found;
  }

  void add_alibi(const ChunkPlace& place, const Patch& patch, Scalar* scores) const {
    alignas(64) Scalar lane_positions[width];
    for (int l = 0; l < width; ++l) {
      lane_positions[l] = static_cast<Scalar>(l);
    }
    const AlibiSlope<S> slope(modifiers_.alibi_slope);
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      const Vector position = S::set(static_cast<Scalar>(place.row_begin + r + ranges_.offset - place.key_begin));
      for (int v = patch.vector_begin; v < patch.vector_end; ++v) {
        Scalar* at = scores + r * width + v * lanes;
        const Vector score = S::load(at);
        const Vector distance = S::abs(position - S::load(lane_positions + v * lanes));
        const Vector sum = S::fma(slope.factor, distance, score);
        S::store(at, slope.finite ? settled<S>(sum, score, S::zero()) : sum);
      }
    }
  }

  const Modifiers& modifiers_;
  const RangeRule& ranges_;
};

}  // namespace
}  // namespace headway::cpu
