// Score modifiers on a chunk of natural scores S^T, [keys][queries in lanes], in the contract's order: softcap, bias,
// ALiBi, masks. A forbidden score becomes -inf whatever it was, so that the softmax ignores it.
#pragma once

#include <cstdint>
#include <cstring>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/store_as.h"
#include "engines/cpu/kernel/tanh.h"
#include "engines/cpu/simd/common.h"
#include "engines/cpu/simd/vocabulary.h"

namespace headway::cpu {
namespace {

constexpr double log2e = 1.4426950408889634074;
constexpr int chunk_keys = 64;  // of scores that are modified while they are in the first-level cache

// One vector of queries: rows row_begin .. row_begin + rows - 1, and keys key_begin .. key_begin + keys - 1.
struct ChunkPlace {
  std::int64_t row_begin;
  int rows;
  std::int64_t key_begin;
  int keys;  // up to chunk_keys
};

// Bit l: whether byte l is not 0. Without an instruction for it, eight at a time: a carry out of its low bits, or its
// own high bit, marks such a byte, and one multiplication gathers the marks.
template <class S>
HEADWAY_INLINE std::uint64_t mask_word(const std::uint8_t* bytes, std::int64_t stride, int keys) {
  if constexpr (FindsNonzeroBytes<S>) {
    if (stride == 1) {
      return S::nonzero_bytes(bytes, keys);
    }
  }
  constexpr std::uint64_t low_seven = 0x7f7f7f7f7f7f7f7fULL;
  std::uint64_t word = 0;
  int l = 0;
  for (; stride == 1 && l + 8 <= keys; l += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, bytes + l, sizeof eight);
    const std::uint64_t marks = ((((eight & low_seven) + low_seven) | eight) & ~low_seven) >> 7;
    word |= ((marks * 0x0102040810204080ULL) >> 56) << l;
  }
  for (; l < keys; ++l) {
    word |= static_cast<std::uint64_t>(bytes[l * stride] != 0) << l;
  }
  return word;
}

// Bit j of word r becomes bit r of word j; words behind a panel's rows are 0. Without instructions for it, by swapping
// ever smaller off-diagonal squares.
template <class S>
HEADWAY_INLINE void transpose_bits(std::uint64_t (&bits)[64]) {
  if constexpr (TransposesBits<S>) {
    S::transpose_bits(bits);
  } else {
    std::uint64_t low = 0x00000000ffffffffULL;
    for (int size = 32; size > 0; size >>= 1, low ^= low << size) {
      for (int r = 0; r < 64; r = (r + size + 1) & ~size) {
        const std::uint64_t swapped = ((bits[r] >> size) ^ bits[r + size]) & low;
        bits[r] ^= swapped << size;
        bits[r + size] ^= swapped;
      }
    }
  }
}

// What a mask leaves of some rows and up to 64 keys. Rows that agree, as all do in a padding mask, need no
// transposition, whether the mask stores one row for all or repeats it.
struct MaskBits {
  bool rows_agree;
  std::uint64_t keys;              // where rows agree: a bit a key
  std::uint64_t rows[chunk_keys];  // else of each key, a bit a row
};

template <class S>
HEADWAY_INLINE std::uint64_t mask_word_of_row(const Matrix& mask, std::int64_t row, std::int64_t key, int keys) {
  const auto* bytes = static_cast<const std::uint8_t*>(mask.data);
  return mask_word<S>(bytes + row * mask.row_stride + key * mask.column_stride, mask.column_stride, keys);
}

template <class S>
HEADWAY_NOINLINE void load_mask_bits(const Matrix& mask, const ChunkPlace& place, MaskBits& bits) {
  std::uint64_t every = mask_word_of_row<S>(mask, place.row_begin, place.key_begin, place.keys), some = every;
  bits.rows[0] = every;
  for (int r = 1; mask.row_stride != 0 && r < place.rows; ++r) {
    bits.rows[r] = mask_word_of_row<S>(mask, place.row_begin + r, place.key_begin, place.keys);
    every &= bits.rows[r];
    some |= bits.rows[r];
  }
  bits.keys = every;
  bits.rows_agree = every == some;
  if (!bits.rows_agree) {
    for (int r = place.rows; r < chunk_keys; ++r) {
      bits.rows[r] = 0;
    }
    transpose_bits<S>(bits.rows);
  }
}

// score + term where that is finite; else what the definition says: a term of -inf forbids, another infinite or NaN
// operand makes the sum what it is, and two finite ones that overflow in units of log2 (a mask made of the type's
// lowest number) stay finite.
template <class S>
HEADWAY_INLINE typename S::Vector settled(typename S::Vector sum, typename S::Vector score, typename S::Vector term) {
  using Scalar = typename S::Scalar;
  const typename S::Vector highest =
      S::set(sizeof(Scalar) == 4 ? static_cast<Scalar>(__FLT_MAX__) : static_cast<Scalar>(__DBL_MAX__));
  if (!S::any(S::not_less_equal(S::abs(sum), highest))) {
    return sum;
  }
  const typename S::Vector infinity = S::set(static_cast<Scalar>(__builtin_inff()));
  const typename S::Vector finite = S::max(S::zero() - highest, S::min(highest, sum));  // NaN passes
  const typename S::Vector kept = S::select(S::equal(S::abs(score), infinity), sum, finite);
  const typename S::Vector summed = S::select(S::equal(term, infinity), sum, kept);
  return S::select(S::equal(term, S::zero() - infinity), term, summed);
}

// A score with its bias added; -inf forbids whatever the score is. `units` is 1 for natural scores, log2e for those in
// units of log2.
template <class S>
HEADWAY_INLINE typename S::Vector biased(typename S::Vector score, typename S::Vector bias, double units = log2e) {
  return settled<S>(S::fma(bias, S::set(static_cast<typename S::Scalar>(units)), score), score, bias);
}

// The rows of a mask and a bias that a chunk of scores needs, fetched while the scores are computed: each lies in lines
// and a page of its own, which no prefetcher of the machine follows.
class RowsToCome {
 public:
  RowsToCome(const Modifiers& modifiers, std::int64_t row, int rows, const Range& keys)
      : mask_(ahead(modifiers.mask, 1, row, rows, keys)),
        bias_(ahead(modifiers.bias, storage_size(modifiers.bias_storage), row, rows, keys)) {}

  // The next `rows` of them.
  HEADWAY_INLINE void fetch(int rows) {
    mask_.fetch(done_, rows);
    bias_.fetch(done_, rows);
    done_ += rows;
  }

 private:
  static Ahead ahead(const Matrix& matrix, std::int64_t element, std::int64_t row, int rows, const Range& keys) {
    if (matrix.data == nullptr || matrix.column_stride != 1) {
      return {};
    }
    const std::int64_t first = row * matrix.row_stride + keys.begin;
    return {static_cast<const char*>(matrix.data) + first * element, matrix.row_stride * element,
            (keys.end - keys.begin) * element, rows};
  }

  const Ahead mask_, bias_;
  std::int64_t done_ = 0;
};

// What distances are multiplied by. A finite slope stays finite in the type of the scores, so that 0 is what it gives a
// row's own position; what another one gives needs no settling.
template <class S>
struct AlibiSlope {
  using Scalar = typename S::Scalar;

  explicit AlibiSlope(double slope) : finite(slope - slope == 0) {
    constexpr double highest = sizeof(Scalar) == 4 ? static_cast<double>(__FLT_MAX__) : __DBL_MAX__;
    const double cut = !finite ? slope : slope > highest ? highest : slope < -highest ? -highest : slope;
    factor = S::set(static_cast<Scalar>(-cut));
  }

  bool finite;
  typename S::Vector factor;
};

template <class S>
class ScoreModifier {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;

  ScoreModifier(const Modifiers& modifiers, const RangeRule& ranges) : modifiers_(modifiers), ranges_(ranges) {}

  // Modifies scores[key][lane] of one vector of queries; `mask_bits` are the panel's, with this vector's lanes from bit
  // `mask_shift` on.
  HEADWAY_NOINLINE void apply(Scalar* scores, std::int64_t width, const ChunkPlace& place, const MaskBits& mask_bits,
                              int mask_shift) const {
    if (modifiers_.softcap != 0) {
      cap(scores, width, place.keys);
    }
    if (modifiers_.has_alibi) {
      add_alibi(scores, width, place);
    }
    if (modifiers_.bias.data != nullptr) {  // behind ALiBi, since a bias of -inf forbids whatever the score is
      switch (modifiers_.bias_storage) {
        case Storage::f32: add_bias<float>(scores, width, place); break;
        case Storage::f64: add_bias<double>(scores, width, place); break;
        case Storage::bf16: add_bias<bfloat16>(scores, width, place); break;
        case Storage::f16: add_bias<float16>(scores, width, place); break;
      }
    }
    if (modifiers_.mask.data != nullptr) {
      apply_mask(scores, width, place.keys, mask_bits, mask_shift);
    }
  }

 private:
  static HEADWAY_INLINE Vector forbidden() { return S::set(-static_cast<Scalar>(__builtin_inff())); }

  static void apply_mask(Scalar* scores, std::int64_t width, int keys, const MaskBits& bits, int shift) {
    if (bits.rows_agree) {
      for (std::uint64_t left = ~bits.keys & low_bits(keys); left != 0; left &= left - 1) {
        S::store(scores + __builtin_ctzll(left) * width, forbidden());
      }
      return;
    }
    for (int j = 0; j < keys; ++j) {
      const auto allowed = S::mask_from_bits(bits.rows[j] >> shift);
      S::store(scores + j * width, S::select(allowed, S::load(scores + j * width), forbidden()));
    }
  }

  void cap(Scalar* scores, std::int64_t width, int keys) const {
    const SoftCap<S> soft_cap(modifiers_.softcap);
    for (int j = 0; j < keys; ++j) {
      S::store(scores + j * width, soft_cap(S::load(scores + j * width)));
    }
  }

  template <class In>
  void add_bias(Scalar* scores, std::int64_t width, const ChunkPlace& place) const {
    const Matrix& bias = modifiers_.bias;
    const In* first = static_cast<const In*>(bias.data) + place.row_begin * bias.row_stride;
    for (int j = 0; j < place.keys; j += S::lanes) {
      const int count = at_most(place.keys - j, S::lanes);
      Vector block[S::lanes];
      if (bias.row_stride == 0) {
        alignas(64) Scalar terms[S::lanes];
        S::store(terms, load_row<S>(first, bias.column_stride, place.key_begin + j, count));
        for (int c = 0; c < S::lanes; ++c) {
          block[c] = S::set(terms[c]);
        }
      } else {
        for (int r = 0; r < S::lanes; ++r) {
          block[r] = r < place.rows
                         ? load_row<S>(first + r * bias.row_stride, bias.column_stride, place.key_begin + j, count)
                         : S::zero();
        }
        S::transpose(block);
      }
      add_terms(
          scores + j * width, width, count, [&](int c, Vector score) HEADWAY_LAMBDA { return block[c] + score; },
          [&](int c) HEADWAY_LAMBDA { return block[c]; });
    }
  }

  void add_alibi(Scalar* scores, std::int64_t width, const ChunkPlace& place) const {
    alignas(64) Scalar positions[S::lanes];
    for (int r = 0; r < S::lanes; ++r) {
      positions[r] = static_cast<Scalar>(place.row_begin + r + ranges_.offset - place.key_begin);
    }
    const AlibiSlope<S> slope(modifiers_.alibi_slope);
    for (int j = 0; !slope.finite && j < place.keys; ++j) {
      const Vector distance = S::abs(S::load(positions) - S::set(static_cast<Scalar>(j)));
      S::store(scores + j * width, S::fma(slope.factor, distance, S::load(scores + j * width)));
    }
    for (int j = 0; slope.finite && j < place.keys; j += S::lanes) {
      const Vector position = S::load(positions) - S::set(static_cast<Scalar>(j));
      add_terms(
          scores + j * width, width, at_most(place.keys - j, S::lanes),
          [&](int c, Vector score)
              HEADWAY_LAMBDA { return S::fma(slope.factor, S::abs(position - S::set(static_cast<Scalar>(c))), score); },
          [&](int) HEADWAY_LAMBDA { return S::zero(); });
    }
  }

  // score = sum(c, score) for c < count, up to a vector's lanes, settled with the term behind it where a sum is not
  // finite: one test serves several. Terms of -inf are common in masks, and what they give needs no settling.
  template <class Sum, class Term>
  HEADWAY_INLINE static void add_terms(Scalar* scores, std::int64_t width, int count, const Sum& sum,
                                       const Term& term) {
    constexpr int group = S::lanes < 8 ? S::lanes : 8;
    HEADWAY_UNROLL
    for (int first = 0; first < S::lanes; first += group) {
      Vector sums[group];
      Vector zeros = S::zero();  // NaN after 0 * inf or 0 * NaN
      if (first + group <= count) {
        HEADWAY_UNROLL
        for (int c = 0; c < group; ++c) {
          sums[c] = sum(first + c, S::load(scores + (first + c) * width));
          zeros = S::fma(sums[c], S::zero(), zeros);
        }
        if (S::any(S::not_less_equal(zeros, S::zero()))) {
          zeros = S::zero();
          HEADWAY_UNROLL
          for (int c = 0; c < group; ++c) {
            const auto forbids = S::equal(term(first + c), forbidden());
            zeros = S::fma(S::select(forbids, S::zero(), sums[c]), S::zero(), zeros);
            sums[c] = S::select(forbids, forbidden(), sums[c]);
          }
        }
        if (!S::any(S::not_less_equal(zeros, S::zero()))) {
          HEADWAY_UNROLL
          for (int c = 0; c < group; ++c) {
            S::store(scores + (first + c) * width, sums[c]);
          }
          continue;
        }
      }
      for (int c = first; c < first + group && c < count; ++c) {
        const Vector score = S::load(scores + c * width);
        S::store(scores + c * width, settled<S>(sum(c, score), score, term(c)));
      }
    }
  }

  const Modifiers& modifiers_;
  const RangeRule& ranges_;
};

// Whether a bias is -inf, read as bits.
HEADWAY_NOINLINE bool is_minus_infinity(const Matrix& bias, Storage storage, std::int64_t row, std::int64_t key) {
  const std::int64_t at = row * bias.row_stride + key * bias.column_stride;
  switch (storage) {
    case Storage::f32: return static_cast<const std::uint32_t*>(bias.data)[at] == 0xff800000u;
    case Storage::f64: return static_cast<const std::uint64_t*>(bias.data)[at] == 0xfff0000000000000u;
    case Storage::bf16: return static_cast<const std::uint16_t*>(bias.data)[at] == 0xff80u;
    case Storage::f16: return static_cast<const std::uint16_t*>(bias.data)[at] == 0xfc00u;
  }
  return false;
}

// The contract's "allowed" for one pair of a row whose range is given, for the rare paths that look at single pairs.
HEADWAY_INLINE bool is_allowed(const RangeRule& rule, const Modifiers& modifiers, const Range& range, std::int64_t row,
                               std::int64_t key) {
  if (!sees_any(rule, range, row, {key, key + 1})) {
    return false;
  }
  const Matrix& mask = modifiers.mask;
  if (mask.data != nullptr &&
      static_cast<const std::uint8_t*>(mask.data)[row * mask.row_stride + key * mask.column_stride] == 0) {
    return false;
  }
  return modifiers.bias.data == nullptr || !is_minus_infinity(modifiers.bias, modifiers.bias_storage, row, key);
}

template <class S, class In>
HEADWAY_INLINE bool are_minus_infinity(const In* first, std::int64_t stride, int keys) {
  const auto lowest = S::set(-static_cast<typename S::Scalar>(__builtin_inff()));
  for (int j = 0; j < keys; j += S::lanes) {
    const int begin = j + S::lanes <= keys || keys < S::lanes ? j : keys - S::lanes;
    const auto terms = load_row<S>(first, stride, begin, at_most(keys - begin, S::lanes));
    const auto counts = S::mask_from_bits(low_bits(keys - begin));
    if (S::any(S::both(counts, S::not_less_equal(terms, lowest)))) {
      return false;
    }
  }
  return true;
}

// Whether the mask alone or the bias alone forbids all of these pairs. The first one that it allows ends the search.
template <class S>
HEADWAY_NOINLINE bool forbid_all(const Modifiers& modifiers, const ChunkPlace& place) {
  const Matrix &mask = modifiers.mask, &bias = modifiers.bias;
  bool forbids = mask.data != nullptr;
  for (int r = 0; forbids && r < (mask.row_stride == 0 ? 1 : place.rows); ++r) {
    forbids = mask_word_of_row<S>(mask, place.row_begin + r, place.key_begin, place.keys) == 0;
  }
  if (forbids || bias.data == nullptr ||
      !is_minus_infinity(bias, modifiers.bias_storage, place.row_begin, place.key_begin)) {
    return forbids;
  }
  forbids = true;
  with_storage(modifiers.bias_storage, [&]<class In>(In*) {
    const In* first =
        static_cast<const In*>(bias.data) + place.row_begin * bias.row_stride + place.key_begin * bias.column_stride;
    for (int r = 0; forbids && r < (bias.row_stride == 0 ? 1 : place.rows); ++r) {
      forbids = are_minus_infinity<S>(first + r * bias.row_stride, bias.column_stride, place.keys);
    }
  });
  return forbids;
}

// Scores outside the rows' key ranges become -inf: one vector of queries, keys key_begin on.
template <class S>
HEADWAY_NOINLINE void forbid_outside_ranges(typename S::Scalar* scores, std::int64_t width, const Range* ranges,
                                            std::int64_t key_begin, std::int64_t keys) {
  using Scalar = typename S::Scalar;
  alignas(64) Scalar begin[S::lanes];
  alignas(64) Scalar end[S::lanes];
  for (int r = 0; r < S::lanes; ++r) {  // relative to key_begin and clamped, so exact in any floating type
    begin[r] = static_cast<Scalar>(smaller(larger(ranges[r].begin - key_begin, 0), keys));
    end[r] = static_cast<Scalar>(smaller(larger(ranges[r].end - key_begin, 0), keys));
  }
  const typename S::Vector from = S::load(begin);
  const typename S::Vector to = S::load(end);
  const typename S::Vector forbidden = S::set(-static_cast<Scalar>(__builtin_inff()));
  for (std::int64_t j = 0; j < keys; ++j) {
    const typename S::Vector position = S::set(static_cast<Scalar>(j));
    const auto inside = S::both(S::less_equal(from, position), S::less(position, to));
    S::store(scores + j * width, S::select(inside, S::load(scores + j * width), forbidden));
  }
}

}  // namespace
}  // namespace headway::cpu
