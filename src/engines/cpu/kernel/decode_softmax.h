// The softmax of a decode task's block of keys, row by row: modified scores, weights against the block's highest score,
// and their sum; and the weights that a caller asked for.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/decode_block.h"
#include "engines/cpu/kernel/decode_task.h"
#include "engines/cpu/kernel/dropout.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"

namespace headway::cpu {
namespace {

template <class S>
class DecodeSoftmax {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes, tile = DecodeLayout<S>::tile;

 public:
  DecodeSoftmax(const DecodeTask<S>& task, const DecodeBlock<S>& block) : task_(task), block_(block), at_(task.at) {}

  // Modifies the scores of the hull's tiles, and makes those that are not allowed -inf.
  HEADWAY_NOINLINE void modify(int r, const Range& hull) {
    const ForwardArgs& head = task_.head_of(r);
    const std::int64_t i = task_.query_of(r);
    Modifiers after_cap = head.modifiers;
    after_cap.softcap = 0;
    const KeyLaneModifier<S> modifier(after_cap, head.ranges);
    at_.forbids[r] = false;
    for (std::int64_t t = block_.first_tile(hull); t < block_.end_tile(hull); ++t) {
      const std::int64_t key = block_.begin + t * tile;
      const int keys = at_most(block_.end - key, tile);
      std::uint64_t allowed = row_word(head.ranges, at_.ranges[r], i, key, keys);
      if (head.modifiers.mask.data != nullptr) {
        const Matrix& mask = head.modifiers.mask;
        allowed &=
            mask_word<S>(static_cast<const std::uint8_t*>(mask.data) + i * mask.row_stride + key * mask.column_stride,
                         mask.column_stride, keys);
      }
      if (head.modifiers.softcap != 0) {
        cap(at_.scores_of(r) + t * tile, head.modifiers.softcap);
      }
      if (head.modifiers.any) {
        modifier.apply({i, 1, key, keys}, {0, 1, 0, (keys + lanes - 1) / lanes}, at_.scores_of(r) + t * tile, nullptr,
                       &allowed);
      }
      if (allowed != low_bits(tile)) {
        forbid(at_.scores_of(r) + t * tile, allowed);
        at_.forbids[r] |= allowed != range_word(inside_panel(hull, key, keys));
      }
      at_.allowed_of(r)[t] = allowed;
    }
  }

  // p = 2^(s - reference) in place, and the sum; then dropout.
  HEADWAY_NOINLINE void soften(int r, const Range& hull) {
    const std::int64_t begin = block_.first_tile(hull) * S::panel_vectors;
    const std::int64_t end = block_.end_tile(hull) * S::panel_vectors;
    Scalar* scores = at_.scores_of(r);
    Vector highest = S::set(-infinity<S>);
    for (std::int64_t v = begin; v < end; ++v) {
      highest = S::max(S::load(scores + v * lanes), highest);
    }
    const Scalar reference = highest_lane<S>(highest);
    const Vector subtract = S::set(reference == -infinity<S> ? Scalar{0} : reference);
    const Vector to_log2 = S::set(static_cast<Scalar>(task_.to_log2));
    Vector sum = S::zero(), part = S::zero();
    for (std::int64_t v = begin; v < end;) {
      const std::int64_t stop = smaller(end, (v / summed + 1) * summed);
      Vector few = S::zero();
      for (; v < stop; ++v) {
        const Vector weight = exp2<S>((S::load(scores + v * lanes) - subtract) * to_log2);
        few = few + weight;
        S::store(scores + v * lanes, weight);
      }
      part = part + few;
      if (v % (summed * summed) == 0) {
        sum = sum + part;
        part = S::zero();
      }
    }
    at_.references[r] = reference;
    at_.sums[r] = lane_total(sum + part);
    if (task_.head.dropout.active) {
      drop_weights(r, hull);
    }
  }

  // The block's columns of a row: 0 for keys that are not allowed, also in a row that is NaN.
  template <class In>
  void store_weights(int r, const Range& hull, Scalar reference, Scalar factor) {
    const WritableMatrix& weights = task_.head_of(r).weights;
    In* row = static_cast<In*>(weights.data) + task_.query_of(r) * weights.row_stride;
    const bool some = hull.begin < hull.end;
    const std::int64_t begin = some ? block_.first_tile(hull) : 0;
    const std::int64_t end = some ? block_.end_tile(hull) : 0;
    const Vector subtract = S::set(reference == -infinity<S> ? Scalar{0} : reference);
    const Vector to_log2 = S::set(static_cast<Scalar>(task_.to_log2));
    for (std::int64_t key = block_.begin; key < block_.end; key += lanes) {
      const std::int64_t at = key - block_.begin;
      const std::int64_t t = at / tile;
      Vector weight = S::zero();
      if (t >= begin && t < end) {
        weight = exp2<S>((S::load(at_.scores_of(r) + at) - subtract) * to_log2) * S::set(factor);
        weight = S::select(S::mask_from_bits(at_.allowed_of(r)[t] >> (at % tile)), weight, S::zero());
      }
      store_row<S>(row, weights.column_stride, key, at_most(block_.end - key, lanes), weight);
    }
  }

 private:
  static void cap(Scalar* scores, double softcap) {
    const SoftCap<S> soft_cap(softcap);
    for (int v = 0; v < S::panel_vectors; ++v) {
      S::store(scores + v * lanes, soft_cap(S::load(scores + v * lanes)));
    }
  }

  static HEADWAY_INLINE void forbid(Scalar* scores, std::uint64_t allowed) {
    for (int v = 0; v < S::panel_vectors; ++v) {
      const auto mask = S::mask_from_bits(allowed >> (v * lanes));
      S::store(scores + v * lanes, S::select(mask, S::load(scores + v * lanes), S::set(-infinity<S>)));
    }
  }

  static HEADWAY_INLINE Scalar lane_total(Vector x) {
    alignas(64) Scalar elements[lanes];
    S::store(elements, x);
    for (int half = lanes / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) {
        elements[l] += elements[l + half];
      }
    }
    return elements[0];
  }

  void drop_weights(int r, const Range& hull) {
    const ForwardArgs& head = task_.head_of(r);
    for (std::int64_t t = block_.first_tile(hull); t < block_.end_tile(hull); ++t) {
      const std::uint64_t kept = kept_word<S>(head.dropout, task_.query_of(r), block_.begin + t * tile, tile);
      for (int v = 0; v < S::panel_vectors; ++v) {
        Scalar* at = at_.scores_of(r) + t * tile + v * lanes;
        S::store(at, S::select(S::mask_from_bits(kept >> (v * lanes)), S::load(at), S::zero()));
      }
    }
  }

  const DecodeTask<S>& task_;
  const DecodeBlock<S>& block_;
  const DecodeLayout<S> at_;
};

}  // namespace
}  // namespace headway::cpu
