// The softmax of a warpgroup's rows, block by block. A thread holds two rows (8 apart), of which it sees every fourth
// pair of columns; the four lanes of a quad share a row.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "engines/cuda/ptx/warp.cuh"
#include "headway/dtype.h"

namespace headway::cuda {

inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;
inline constexpr float minus_infinity = -INFINITY;

// Which of a block's columns a row sees: [begin, end), counted from the thread's own first column.
struct ColumnRange {
  int begin, end;

  // The same as a bit for each column that the thread holds: 2 j + c for column 8 j + c.
  template <int columns>
  __device__ __forceinline__ std::uint64_t bits() const {
    return below<columns>(end) & ~below<columns>(begin);
  }

 private:
  // Those in front of a column.
  template <int columns>
  static __device__ __forceinline__ std::uint64_t below(int column) {
    const int within = max(0, min(column, 4 * columns));
    return (std::uint64_t{1} << (within / 8 * 2 + min(within % 8, 2))) - 1;
  }
};

// Tests of single bits, at known places, take one instruction for seven of them.
template <int count>
__device__ __forceinline__ void mask_columns(float (&scores)[count], const ColumnRange (&rows)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint64_t bits = rows[i].template bits<count / 2>();
    const std::uint32_t words[2] = {static_cast<std::uint32_t>(bits), static_cast<std::uint32_t>(bits >> 32)};
#pragma unroll
    for (int k = 0; k < count / 2; ++k) {
      float& score = scores[k / 2 * 4 + 2 * i + k % 2];
      score = (words[k / 32] & 1u << (k % 32)) != 0 ? score : minus_infinity;
    }
  }
}

// Multiplies the output sums of both rows.
template <int count>
__device__ __forceinline__ void rescale_rows(float (&out)[count], const float (&factors)[2]) {
#pragma unroll
  for (int k = 0; k < count; ++k) {
    out[k] *= factors[k / 2 % 2];
  }
}

// The highest of a thread's scores of row i.
template <int count>
__device__ __forceinline__ float highest_score(const float (&scores)[count], int i) {
  float even = scores[2 * i], odd = scores[2 * i + 1];
#pragma unroll
  for (int j = 1; j < count / 4; ++j) {
    even = fmaxf(even, scores[4 * j + 2 * i]);
    odd = fmaxf(odd, scores[4 * j + 2 * i + 1]);
  }
  return fmaxf(even, odd);
}

// What a row's scores have in common and do not hold yet: a float, or nothing.
struct NoRest {};
template <class Rest>
inline constexpr bool has_rest = !std::is_same_v<Rest, NoRest>;

// Weights are 2^(unit * (score - reference) + shift) where reference is the highest score so far and unit is log2(e),
// times the scale where scores are still products. A fused multiply-add does, with unit * reference rounded; but beyond
// 2^24 that is off by whole powers of 2, and a row's weights would overflow or vanish together. There the reference is
// subtracted from the row's scores first.
//
// shift lifts the weights of f16 to 2^14 at most: its smallest number is 2^-24, and many small weights may matter
// together.
template <class Half>
struct TileSoftmax {
  static constexpr float shift = std::is_same_v<Half, float16> ? 14.0f : 0.0f;

  float reference[2];  // the highest score so far
  float sum[2];        // this thread's share
  float unit;
  float coarse;  // 2^24 / unit

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[i] = minus_infinity;
      sum[i] = 0.0f;
    }
  }

  // Raises row i's reference to the block's highest score; returns what older sums are multiplied with. The scores are
  // without `rest`, which all that a thread has of the row have in common.
  template <class Rest, int count>
  __device__ __forceinline__ float raise(const float (&scores)[count], int i, Rest rest) {
    float highest = highest_score(scores, i);
    if constexpr (has_rest<Rest>) {
      highest += rest;  // lanes of a quad have their own
    }
    return raise_to(highest, i);
  }

  // The same for a thread's highest score.
  __device__ __forceinline__ float raise_to(float highest, int i) {
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    const float old = reference[i];
    reference[i] = fmaxf(old, highest);
    return ptx::exp2_fast((old - finite_reference(i)) * unit);
  }

  // What row i's exponents are relative to.
  template <class Rest>
  __device__ __forceinline__ float base(int i, Rest rest) const {
    if constexpr (has_rest<Rest>) {
      return finite_reference(i) - rest;
    } else {
      return finite_reference(i);
    }
  }

  // The same for both rows in units of log2; a coarse one is taken from its row's scores instead.
  template <int count>
  __device__ __forceinline__ void bases_in_log2(float (&scores)[count], float (&bases)[2]) const {
    if (fmaxf(fabsf(bases[0]), fabsf(bases[1])) > coarse) [[unlikely]] {
      subtract_coarse(scores, 0, bases[0]);
      subtract_coarse(scores, 1, bases[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bases[i] = bases[i] * unit - shift;
    }
  }

  // Scores become weights and join the sum.
  template <int count>
  __device__ __forceinline__ void exponentials(float (&scores)[count], int i, float older, float base) {
    exponentials(scores, i, older, [&](float score) { return fmaf(score, unit, -base); });
  }

  // The same with an exponent(score) of the caller's.
  template <int count, class Exponent>
  __device__ __forceinline__ void exponentials(float (&scores)[count], int i, float older, const Exponent& exponent) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < count / 4; ++j) {
      float& first = scores[4 * j + 2 * i];
      float& second = scores[4 * j + 2 * i + 1];
      first = ptx::exp2_fast(exponent(first));
      second = ptx::exp2_fast(exponent(second));
      even += first;
      odd += second;
    }
    sum[i] = sum[i] * older + (even + odd);
  }

  // The end of a row's keys. From here on references are natural: `scale` is what makes a score so.
  __device__ __forceinline__ void join_quad(float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[i] *= scale;
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
  }

  // A sink takes part in the sum like a key without value, and an infinite one has all weight; returns what the output
  // is multiplied with for it.
  __device__ __forceinline__ float add_sink(int i, float sink) {
    const float old = reference[i];
    reference[i] = fmaxf(old, sink);
    const float base = finite_reference(i);
    const float older = ptx::exp2_fast((old - base) * log2_e);
    const float exponent = sink == INFINITY ? 0.0f : (sink - base) * log2_e;
    sum[i] = sum[i] * older + ptx::exp2_fast(exponent + shift);
    return older;
  }

  __device__ __forceinline__ float lse(int i) const {
    return sum[i] == 0.0f ? minus_infinity : reference[i] + (ptx::log2_fast(sum[i]) - shift) * ln_2;
  }

 private:
  template <int count>
  __device__ __forceinline__ void subtract_coarse(float (&scores)[count], int i, float& base) const {
    if (fabsf(base) > coarse) {
#pragma unroll
      for (int k = 0; k < count / 2; ++k) {
        scores[k / 2 * 4 + 2 * i + k % 2] -= base;
      }
      base = 0.0f;
    }
  }

  // While a row has seen no key its reference is -inf, and every exponent is -inf - 0.
  __device__ __forceinline__ float finite_reference(int i) const {
    return reference[i] == minus_infinity ? 0.0f : reference[i];
  }
};

}  // namespace headway::cuda
