// Dropout on a block of weights: the mask of core/dropout.h, a vector of queries at a time. One Philox call serves four
// keys of a query, so a vector of calls covers one vector of queries x 4 keys.
//
// Philox bounds it: 7 of its 10 rounds at 6 instructions per 8 queries x 4 keys, twice what the exponentials of the
// same weights cost. The first rounds see one word that differs from query to query and three that do not, so most of
// their work is the same for all lanes, or for all keys.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/simd/common.h"
#include "engines/cpu/simd/vocabulary.h"

namespace headway::cpu {
namespace {

constexpr int philox_rounds = 10;
constexpr std::uint32_t philox_multiplier_0 = 0xD2511F53u;
constexpr std::uint32_t philox_multiplier_2 = 0xCD9E8D57u;

// The key of each round, in memory: as an operand from there it costs no instruction.
struct PhiloxKeys {
  std::uint32_t low[philox_rounds], high[philox_rounds];

  explicit PhiloxKeys(std::uint64_t seed) {
    for (int round = 0; round < philox_rounds; ++round) {
      low[round] = static_cast<std::uint32_t>(seed) + static_cast<std::uint32_t>(round) * 0x9E3779B9u;
      high[round] = static_cast<std::uint32_t>(seed >> 32) + static_cast<std::uint32_t>(round) * 0xBB67AE85u;
    }
  }
};

// Words holds 64-bit lanes of which the low halves are Philox's 32-bit words.
template <class S>
struct PhiloxWords {
  typename S::Words word[4];
};

// The counter after the rounds from `begun` on.
template <class S, int begun = 0>
HEADWAY_INLINE PhiloxWords<S> philox(const PhiloxKeys& keys, PhiloxWords<S> counter) {
  auto& [c0, c1, c2, c3] = counter.word;
  HEADWAY_UNROLL
  for (int round = begun; round < philox_rounds; ++round) {
    const typename S::Words product_0 = S::multiply_low_words(S::words(philox_multiplier_0), c0);
    const typename S::Words product_2 = S::multiply_low_words(S::words(philox_multiplier_2), c2);
    c0 = S::exclusive_or(S::high_words(product_2), c1, S::words(keys.low[round]));
    c2 = S::exclusive_or(S::high_words(product_0), c3, S::words(keys.high[round]));
    c1 = product_2;
    c3 = product_0;
  }
  return counter;
}

// What dropout keeps of one vector of queries, four keys at a time.
template <class S>
class KeptOfQueries {
 public:
  KeptOfQueries(const DropoutRule& rule, std::int64_t row_begin) : rule_(rule), keys_(rule.seed) {
    const Pair product_2 = product(philox_multiplier_2, rule.head);
    first_low_ = product_2.low;
    HEADWAY_UNROLL
    for (int part = 0; part < parts; ++part) {
      const Words rows = S::consecutive_words(static_cast<std::uint64_t>(row_begin + part * S::word_lanes));
      const Words c0 = S::exclusive_or(S::words(product_2.high), rows, S::words(keys_.low[0]));
      second_product_[part] = S::multiply_low_words(S::words(philox_multiplier_0), c0);
      second_high_[part] = S::high_words(second_product_[part]);
    }
  }

  // kept[k] bit r: whether the weight of query row_begin + r and key 4 * key_group + k is kept.
  HEADWAY_INLINE void bits(std::int64_t key_group, std::uint64_t (&kept)[4]) const {
    // Three rounds.
    const Pair first_0 = product(philox_multiplier_0, static_cast<std::uint32_t>(key_group));
    const Pair second_2 = product(philox_multiplier_2, first_0.high ^ rule_.batch ^ keys_.high[0]);
    const Pair third_0 = product(philox_multiplier_0, second_2.high ^ first_low_ ^ keys_.low[1]);
    const Words first_low_0 = S::words(first_0.low);
    const Words second_low_2 = S::words(second_2.low);
    const Words third_high_0 = S::words(third_0.high);
    const Words third_low_0 = S::words(third_0.low);
    PhiloxWords<S> words[parts];
    HEADWAY_UNROLL
    for (int part = 0; part < parts; ++part) {
      const Words c2 = S::exclusive_or(second_high_[part], first_low_0, S::words(keys_.high[1]));
      const Words product_2 = S::multiply_low_words(S::words(philox_multiplier_2), c2);
      words[part] = philox<S, 3>(
          keys_, {{S::exclusive_or(S::high_words(product_2), second_low_2, S::words(keys_.low[2])), product_2,
                   S::exclusive_or(second_product_[part], third_high_0, S::words(keys_.high[2])), third_low_0}});
    }
    HEADWAY_UNROLL
    for (int k = 0; k < 4; ++k) {
      if constexpr (parts == 1) {
        kept[k] = S::low_words_at_least(words[0].word[k], rule_.threshold);
      } else if constexpr (ComparesTwoWords<S>) {
        kept[k] = S::low_words_at_least(words[0].word[k], words[1].word[k], rule_.threshold);
      } else {
        kept[k] = S::low_words_at_least(words[0].word[k], rule_.threshold) |
                  S::low_words_at_least(words[1].word[k], rule_.threshold) << S::word_lanes;
      }
    }
  }

 private:
  using Words = typename S::Words;
  static constexpr int parts = S::lanes / S::word_lanes;
  static_assert(parts == 1 || parts == 2);

  struct Pair {
    std::uint32_t low, high;
  };
  HEADWAY_INLINE static Pair product(std::uint32_t a, std::uint32_t b) {
    const std::uint64_t whole = std::uint64_t{a} * b;
    return {static_cast<std::uint32_t>(whole), static_cast<std::uint32_t>(whole >> 32)};
  }

  const DropoutRule& rule_;
  const PhiloxKeys keys_;
  std::uint32_t first_low_;                           // after round 1, word 1
  Words second_product_[parts], second_high_[parts];  // of round 2, word 0
};

// Zeroes the dropped weights of one vector of queries: keys key_begin .. key_begin + keys - 1. Kept ones are not
// scaled.
template <class S>
HEADWAY_NOINLINE void drop(const DropoutRule& rule, std::int64_t row_begin, std::int64_t key_begin, std::int64_t keys,
                           const typename S::Scalar* weights, typename S::Scalar* dropped, std::int64_t width) {
  const KeptOfQueries<S> kept_of(rule, rule.first_row + row_begin);
  key_begin += rule.first_key;
  for (std::int64_t group = key_begin >> 2; group <= (key_begin + keys - 1) >> 2; ++group) {
    std::uint64_t kept[4];
    kept_of.bits(group, kept);
    const std::int64_t first = 4 * group - key_begin;
    const bool whole = first >= 0 && first + 4 <= keys;
    HEADWAY_UNROLL
    for (int k = 0; k < 4; ++k) {
      const std::int64_t j = first + k;
      if (whole || (j >= 0 && j < keys)) {
        const auto mask = S::mask_from_bits(kept[k]);
        S::store(dropped + j * width, S::select(mask, S::load(weights + j * width), S::zero()));
      }
    }
  }
}

}  // namespace
}  // namespace headway::cpu
