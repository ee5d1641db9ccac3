// What happens to one score between the product and the softmax, in the contract's order: scale, softcap, bias, ALiBi;
// and whether mask and bias allow the pair. Ranges and dropout are elsewhere (key_range.cuh, dropout.cuh).
//
// A score of -inf says that its pair is forbidden. An allowed pair's score may be -inf too, because of infinite inputs:
// it becomes the type's lowest number, which weighs as little, and finite scores stay above that number.
#pragma once

#include "engines/cuda/arguments.h"
#include "engines/cuda/elements.cuh"

namespace headway::cuda {

// A pair of a tile: query i, key j, and whether j lies in i's range (mask and bias are read only there).
struct Pair {
  std::int64_t i, j;
  bool inside;
};

// The modifiers of one head of one item.
template <class Real>
class Modifiers {
 public:
  __device__ Modifiers(const Arguments& arguments, const Sequence& sequence, std::int64_t b, std::int64_t h)
      : scale_(bounded<Real>(arguments.scale)),
        softcap_(bounded<Real>(arguments.softcap)),
        alibi_(arguments.slopes.data != nullptr),
        offset_(sequence.offset),
        bias_(arguments.bias),
        mask_(arguments.mask) {
    if (alibi_) {
      slope_ = load_number<Real>(arguments.slopes.data, arguments.slopes.dtype, h * arguments.slopes.stride);
    }
    bias_at_ = b * bias_.batch + h * bias_.head;
    mask_at_ = b * mask_.batch + h * mask_.head;
  }

  // Whether a score is its product times scale, and nothing else.
  __device__ bool only_scale() const {
    return softcap_ == 0 && bias_.data == nullptr && mask_.data == nullptr && !alibi_;
  }
  __device__ Real scale() const { return scale_; }

  __device__ Real scaled(Real product) const { return product * scale_; }

  __device__ Real capped(Real scaled) const { return softcap_ == 0 ? scaled : softcap_ * share_of_cap(scaled); }

  // Turns a few products into scores, -inf where forbidden. where(x) is the Pair of product x; its loads are all issued
  // before the first is used. `slopes` receives d(capped) / d(scaled), 1 without softcap.
  template <int Count, class Where>
  __device__ void apply(Real (&scores)[Count], const Where& where, Real* slopes = nullptr) const {
#pragma unroll
    for (int x = 0; x < Count; ++x) {
      scores[x] = scaled(scores[x]);
    }
    apply_to_scaled(scores, where, slopes);
  }

  // The same for products that are scaled already.
  template <int Count, class Where>
  __device__ void apply_to_scaled(Real (&scores)[Count], const Where& where, Real* slopes = nullptr) const {
    bool allowed[Count];
#pragma unroll
    for (int x = 0; x < Count; ++x) {
      allowed[x] = where(x).inside;
      if (slopes != nullptr) {
        slopes[x] = 1;
      }
    }
    if (mask_.data != nullptr) {
#pragma unroll
      for (int x = 0; x < Count; ++x) {
        const Pair pair = where(x);
        allowed[x] = allowed[x] && mask_byte(mask_at_ + pair.i * mask_.query + pair.j * mask_.key) != 0;
      }
    }
    if (softcap_ != 0) {
#pragma unroll
      for (int x = 0; x < Count; ++x) {
        const Real share = share_of_cap(scores[x]);
        scores[x] = softcap_ * share;
        if (slopes != nullptr) {
          slopes[x] = 1 - share * share;
        }
      }
    }
    if (bias_.data != nullptr) {
      Real terms[Count];
      load_bias(terms, allowed, where);
#pragma unroll
      for (int x = 0; x < Count; ++x) {
        allowed[x] = allowed[x] && terms[x] != -infinity<Real>();
        scores[x] = sum(scores[x], terms[x]);
      }
    }
    if (alibi_) {
#pragma unroll
      for (int x = 0; x < Count; ++x) {
        const std::int64_t distance = where(x).i + offset_ - where(x).j;
        const Real term = -slope_ * static_cast<Real>(distance < 0 ? -distance : distance);
        scores[x] = sum(scores[x], held(term, is_finite(slope_)));
      }
    }
#pragma unroll
    for (int x = 0; x < Count; ++x) {
      scores[x] = allowed[x] ? of_allowed(scores[x]) : -infinity<Real>();
    }
  }

  // The score of an allowed pair as it is told from a forbidden one's.
  __device__ static Real of_allowed(Real score) {
    constexpr Real lowest = Limits<Real>::lowest_score;
    return score == -infinity<Real>() ? -Limits<Real>::highest : score < lowest ? lowest : score;
  }

 private:
  __device__ Real share_of_cap(Real scaled) const {
    if constexpr (std::is_same_v<Real, float>) {
      return tanhf(scaled / softcap_);
    } else {
      return tanh(scaled / softcap_);
    }
  }

  __device__ std::uint8_t mask_byte(std::int64_t at) const { return static_cast<const std::uint8_t*>(mask_.data)[at]; }

  template <int Count, class Where>
  __device__ void load_bias(Real (&terms)[Count], const bool (&allowed)[Count], const Where& where) const {
    switch (bias_.dtype) {
      case DType::f64: return load_bias_as<double>(terms, allowed, where);
      case DType::bf16: return load_bias_as<bfloat16>(terms, allowed, where);
      case DType::f16: return load_bias_as<float16>(terms, allowed, where);
      default: return load_bias_as<float>(terms, allowed, where);
    }
  }

  template <class T, int Count, class Where>
  __device__ void load_bias_as(Real (&terms)[Count], const bool (&allowed)[Count], const Where& where) const {
#pragma unroll
    for (int x = 0; x < Count; ++x) {
      const Pair pair = where(x);
      terms[x] = 0;
      if (allowed[x]) {
        const T loaded = static_cast<const T*>(bias_.data)[bias_at_ + pair.i * bias_.query + pair.j * bias_.key];
        if constexpr (std::is_same_v<T, double>) {
          terms[x] = bounded<Real>(loaded);
        } else {
          terms[x] = number<Real>(loaded);
        }
      }
    }
  }

  __device__ static bool is_finite(Real x) { return x >= -Limits<Real>::highest && x <= Limits<Real>::highest; }

  // Finite numbers have a finite result: what passes the type's range stays at its end, so that an allowed pair is
  // never taken for a forbidden one.
  __device__ static Real held(Real result, bool from_finite) {
    constexpr Real highest = Limits<Real>::highest;
    if (from_finite && result > highest) {
      return highest;
    }
    return from_finite && result < -highest ? -highest : result;
  }
  __device__ static Real sum(Real a, Real b) { return held(a + b, is_finite(a) && is_finite(b)); }

  Real scale_, softcap_, slope_ = 0;
  bool alibi_;
  std::int64_t offset_, bias_at_, mask_at_;
  const Matrix &bias_, &mask_;  // kernel parameters: read where they are needed, not kept in registers
};

// Whether the score of an allowed pair says too little: infinite, NaN, or the lowest number. Products may have
// overflowed on the way to a finite score.
template <class Real>
__device__ inline bool is_odd_score(Real score) {
  return !(score > -Limits<Real>::highest && score <= Limits<Real>::highest) && score != -infinity<Real>();
}

// The sink of a head as one more score; -inf without one.
template <class Real>
__device__ inline Real sink_of(const Arguments& arguments, std::int64_t h) {
  return arguments.sinks.data == nullptr
             ? -infinity<Real>()
             : load_number<Real>(arguments.sinks.data, arguments.sinks.dtype, h * arguments.sinks.stride);
}

}  // namespace headway::cuda
