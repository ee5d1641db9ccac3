// Dropout on a block of weights: the mask of core/dropout.h, a vector of queries at a time. One Philox call serves four
// keys of a query, so a vector of calls covers one vector of queries x 4 keys.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// Words holds 64-bit lanes of which the low halves are Philox's 32-bit words.
template <class S>
struct PhiloxWords {
  typename S::Words word[4];
};

template <class S>
HEADWAY_INLINE PhiloxWords<S> philox(std::uint64_t key, typename S::Words c0, typename S::Words c1,
                                     typename S::Words c2, typename S::Words c3) {
  auto key_low = static_cast<std::uint32_t>(key);
  auto key_high = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const typename S::Words product_0 = S::multiply_low_words(S::words(0xD2511F53u), c0);
    const typename S::Words product_2 = S::multiply_low_words(S::words(0xCD9E8D57u), c2);
    c0 = S::exclusive_or(S::high_words(product_2), c1, S::words(key_low));
    c2 = S::exclusive_or(S::high_words(product_0), c3, S::words(key_high));
    c1 = product_2;
    c3 = product_0;
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// kept[k] bit r: whether the weight of query row_begin + r and key 4 * key_group + k is kept.
template <class S>
HEADWAY_INLINE void kept_bits(const DropoutRule& rule, std::int64_t row_begin, std::int64_t key_group,
                              std::uint64_t (&kept)[4]) {
  kept[0] = kept[1] = kept[2] = kept[3] = 0;
  HEADWAY_UNROLL
  for (int part = 0; part < S::lanes; part += S::word_lanes) {
    const auto counter = philox<S>(rule.seed, S::words(static_cast<std::uint32_t>(key_group)),
                                   S::consecutive_words(static_cast<std::uint64_t>(row_begin + part)),
                                   S::words(rule.head), S::words(rule.batch));
    HEADWAY_UNROLL
    for (int k = 0; k < 4; ++k) {
      kept[k] |= S::low_words_at_least(counter.word[k], rule.threshold) << part;
    }
  }
}

// Zeroes the dropped weights of one vector of queries: keys key_begin .. key_begin + keys - 1. Kept ones are not
// scaled.
template <class S>
HEADWAY_NOINLINE void drop(const DropoutRule& rule, std::int64_t row_begin, std::int64_t key_begin, std::int64_t keys,
                           const typename S::Scalar* weights, typename S::Scalar* dropped, std::int64_t width) {
  for (std::int64_t group = key_begin >> 2; group <= (key_begin + keys - 1) >> 2; ++group) {
    std::uint64_t kept[4];
    kept_bits<S>(rule, row_begin, group, kept);
    for (int k = 0; k < 4; ++k) {
      const std::int64_t j = 4 * group + k - key_begin;
      if (j >= 0 && j < keys) {
        const auto mask = S::mask_from_bits(kept[k]);
        S::store(dropped + j * width, S::select(mask, S::load(weights + j * width), S::zero()));
      }
    }
  }
}

}  // namespace
}  // namespace headway::cpu
