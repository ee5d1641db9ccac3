// Which pairs of a query and a key bf16 dot products can compute: see backward_pairs.h.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_task.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/scratch.h"

namespace headway::cpu {
namespace {

// Magnitudes from 2^low up to 2^high, and 0, as the bits of bf16.
struct Ordinary {
  std::uint16_t low, high;

  constexpr Ordinary(int low_exponent, int high_exponent)
      : low(static_cast<std::uint16_t>((127 + low_exponent) << 7)),
        high(static_cast<std::uint16_t>((127 + high_exponent) << 7)) {}

  template <class Magnitudes>
  bool holds_all(const Magnitudes& seen) const {
    return !seen.any_below(low) && !seen.any_from(high);
  }
  bool holds(std::uint32_t bits) const {
    const std::uint32_t magnitude = bits & 0x7fffu;
    return magnitude == 0 || (magnitude >= low && magnitude < high);
  }
  bool holds_row(const Matrix& matrix, std::int64_t row, std::int64_t columns) const {
    const bfloat16* first = static_cast<const bfloat16*>(matrix.data) + row * matrix.row_stride;
    for (std::int64_t c = 0; c < columns; ++c) {
      if (!holds(first[c * matrix.column_stride].bits)) {
        return false;
      }
    }
    return true;
  }

  // 0 in the place of other numbers.
  template <class T>
  void clear_others(typename Operands<T>::Scalar* pairs, std::int64_t count) const {
    for (std::int64_t n = 0; n < count; ++n) {
      for (int part = 0; part < 2; ++part) {
        if (!holds(pairs[n] >> (16 * part))) {
          Operands<T>::clear_part(pairs + n, part);
        }
      }
    }
  }
};

// No product of two of them is flushed, and no sum overflows, also 2^32 times as large and with dropout's scale.
constexpr Ordinary ordinary_inputs{-50, 20};     // Q, K and V
constexpr Ordinary ordinary_gradients{-76, 20};  // dO
constexpr double highest_ordinary_scale = 0x1p20;

// The pairs of a block of queries and a group of keys, sorted into words.
template <class S>
class OddPairs {
  using Task = BackwardTask<S, 2>;
  static constexpr int width = Task::width;

 public:
  template <class Scalar>
  OddPairs(const Task& task, Scratch<Scalar>& scratch) : task_(task), args_(task.args) {
    const std::int64_t panels = Task::Layout::group_keys(args_) / width;
    keys_ = scratch.template take<std::uint64_t>(panels);
    odd = scratch.template take<std::uint64_t>(panels * query_block);
    ordinary = scratch.template take<std::uint64_t>(panels * query_block);
  }

  // [panel][query_block]: pairs whose numbers are not, and are, ordinary.
  std::uint64_t *odd, *ordinary;

  // Looks at each key of the group, if `any` may not be ordinary.
  void find_keys(bool any) {
    for (int p = 0; p < task_.panel_count(); ++p) {
      keys_[p] = 0;
      for (int n = 0; any && n < task_.panel_keys(p); ++n) {
        const std::int64_t key = task_.group.begin + p * width + n;
        const bool is_odd = !ordinary_inputs.holds_row(args_.key, key, args_.head_dim) ||
                            !ordinary_inputs.holds_row(args_.value, key, args_.value_dim);
        keys_[p] |= static_cast<std::uint64_t>(is_odd) << n;
      }
    }
  }

  // Returns whether an allowed pair of the block is odd.
  HEADWAY_NOINLINE bool find_pairs() {
    bool any = false;
    const BackwardHead& head = *task_.head;
    for (int r = 0; r < task_.rows().count; ++r) {
      const std::int64_t row = task_.rows().begin + r;
      const bool row_is_odd = static_cast<const typename S::Scalar*>(head.references)[row] != 0 ||
                              !ordinary_inputs.holds_row(head.query, row, args_.head_dim) ||
                              !ordinary_gradients.holds_row(head.grad_out, row, args_.value_dim);
      for (int p = 0; p < task_.panel_count(); ++p) {
        const std::uint64_t pairs = row_is_odd ? low_bits(task_.panel_keys(p)) : keys_[p];
        odd[p * query_block + r] = pairs;
        ordinary[p * query_block + r] = low_bits(task_.panel_keys(p)) & ~pairs;
        any = any || allows_any(row, p, pairs);
      }
    }
    return any;
  }

 private:
  // Whether one of these pairs of a row and panel p is allowed.
  bool allows_any(std::int64_t row, int p, std::uint64_t pairs) const {
    const BackwardHead& head = *task_.head;
    const Range range = range_of_row(head.ranges, row);
    const std::int64_t first = task_.keys_of(p).begin;
    for (pairs &= range_word(inside_panel(range, first, task_.panel_keys(p))); pairs != 0; pairs &= pairs - 1) {
      if (is_allowed(head.ranges, head.modifiers, range, row, first + __builtin_ctzll(pairs))) {
        return true;
      }
    }
    return false;
  }

  const Task& task_;
  const BackwardArgs& args_;
  std::uint64_t* keys_;  // [panel]: keys that are odd for themselves
};

}  // namespace
}  // namespace headway::cpu
