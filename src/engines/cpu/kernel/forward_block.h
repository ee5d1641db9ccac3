// The current block of keys and values in a forward task: read in place, or copied if products need another layout.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/row_source.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tile_pack.h"

namespace headway::cpu {
namespace {

// Whether a block of keys never needs a copy.
template <class S, class In>
bool reads_keys_in_place(const ForwardArgs& args) {
  return Packing<S, In>::keys_in_place(args.key, args.head_dim) && !rows_collide<In>(args.key, args.head_dim);
}

template <class S>
class ForwardBlock {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Operand = typename Operands<S>::Scalar;
  using Sizes = ForwardSizes<S>;
  static constexpr int lanes = S::lanes, width = Sizes::width, fold = Sizes::fold;

  explicit ForwardBlock(const ForwardTask<S>& task) : task_(task), args_(task.args) {}

  std::int64_t begin = 0, end = 0;  // its keys
  OperandRows<S> keys{}, values{};
  bool hides_values = false;  // see watch_values

  // The block from `key` on. `last` is a multiple of `fold` or the last key's end.
  void enter(std::int64_t key, std::int64_t last) {
    if (key == begin && loaded_) {
      return;
    }
    begin = key;
    end = smaller(key + Sizes::key_block, last);
    loaded_ = false;
    hides_values = false;
  }

  // Makes the block's keys and values, stored as In, readable, once for all panels that visit it.
  template <class In>
  void load() {
    if (loaded_) {
      return;
    }
    const std::int64_t count = end - begin;
    const bool copies = task_.panels >= copying_panels;
    keys = copies && rows_collide<In>(args_.key, args_.head_dim)
               ? Packing<S, In>::copied_keys(run_at<In>(args_.key, begin), 0, count, args_.head_dim, task_.at.key_copy)
               : Packing<S, In>::keys(args_.key, begin, count, args_.head_dim, task_.at.key_copy);
    seen_ = {};
    if constexpr (HasTiles<S>) {
      values = {task_.at.value_copy, transposed_ld(Sizes::key_block)};
      transpose_values<S, In>(args_.value, begin, count, args_.value_dim, task_.at.value_copy, values.ld, seen_,
                              task_.at.value_rows);
    } else if (fold == 1 && copies && rows_collide<In>(args_.value, args_.value_dim)) {
      values =
          Packing<S, In>::copied_keys(run_at<In>(args_.value, begin), 0, count, args_.value_dim, task_.at.value_copy);
    } else {
      values = Packing<S, In>::values(args_.value, begin, count, args_.value_dim, task_.at.value_copy, args_.value_dim,
                                      seen_, task_.at.value_rows);
    }
    loaded_ = true;
    element_ = element<In>;
    const bool forbids = args_.modifiers.mask.data != nullptr || args_.modifiers.bias.data != nullptr;
    if (forbids || any_tiny()) {
      watch_values({begin, end});
    }
  }

  // Before keys that some rows may not attend to: where a value is NaN or infinite, multiplying it by their weight of 0
  // would show it. Such values are then hidden: the block's values become a copy with 0 in their place, and
  // `hides_values` says that add_hidden_values must give them to the rows that may attend.
  HEADWAY_NOINLINE void watch_values(const Range& watched) {
    const Range whole{watched.begin / fold * fold, smaller(watched.end + Sizes::key_step - 1, end)};
    if (hides_values || (values_are_finite(whole) && !any_tiny())) {
      return;
    }
    hides_values = true;
    copy_values();
    for (std::int64_t key = begin; key < end; ++key) {
      for (std::int64_t d = 0; d < args_.value_dim; ++d) {
        if (is_hidden(value_at(key, d))) {
          const std::int64_t j = key - begin;
          Operand* at = task_.at.value_copy + (HasTiles<S> ? d * values.ld + j / fold : j / fold * args_.value_dim + d);
          Operands<S>::clear_part(at, static_cast<int>(j % fold));
        }
      }
    }
  }

  // Leaves the block's values in scratch, where they may be changed, and read past their end by less than a vector.
  void copy_values() {
    Operand* copy = task_.at.value_copy;
    if (values.data == copy) {
      return;
    }
    for (std::int64_t j = 0; j < folded<S>(end - begin); ++j) {
      for (std::int64_t d = 0; d < args_.value_dim; ++d) {
        copy[j * args_.value_dim + d] = values.data[j * values.ld + d];
      }
    }
    values = {copy, args_.value_dim};
  }

  static bool is_hidden(Scalar x) {
    const bool tiny = fold > 1 && x != 0 && x < tiny_value && x > -tiny_value;
    return x - x != 0 || tiny;
  }
  // A value as it is stored, also where it is hidden.
  Scalar value_at(std::int64_t key, std::int64_t d) const { return element_(args_.value, key, d); }

  // The scores, then weights, of the keys from `key` on, for the vectors from v on.
  Scalar* scores_at(std::int64_t key, int v) const {
    return task_.at.scores + (args_.weights.data != nullptr ? key : key - begin) * width + v * lanes;
  }
  const Operand* key_operands(std::int64_t key) const { return keys.data + (key - begin) * keys.ld; }
  const Operand* value_operands(std::int64_t key) const {
    return values.data + (key - begin) / fold * (HasTiles<S> ? 1 : values.ld);
  }

 private:
  template <class In>
  static Scalar element(const RowSource& source, std::int64_t row, std::int64_t column) {
    alignas(64) Scalar loaded[lanes];
    S::store(loaded, SourceRow<S, In>(source, row).part(column, 1));
    return loaded[0];
  }

  // Of the block at hand, before any is hidden.
  bool values_are_finite(const Range& range) const {
    if constexpr (fold == 1) {
      return rows_are_finite<S>({values.data, values.ld}, range.begin - begin, range.end - begin, args_.value_dim);
    } else {
      if (!seen_.any_from(infinity_bits)) {
        return true;
      }
      Vector zeros = S::zero();  // NaN after 0 * inf or 0 * NaN
      for (std::int64_t key = range.begin; key < range.end; ++key) {
        const SourceRow<S, bfloat16> row(args_.value, key);  // which pairs are made of
        for (std::int64_t d = 0; d < args_.value_dim; d += lanes) {
          zeros = S::fma(row.part(d, at_most(args_.value_dim - d, lanes)), S::zero(), zeros);
        }
      }
      return !S::any(S::not_less_equal(zeros, S::zero()));
    }
  }

  // Dot products flush denormals, so values near them are hidden too.
  static constexpr double tiny_value = 0x1p-90;
  static constexpr std::uint16_t tiny_bits = (127 - 90) << 7;  // as bf16
  static constexpr std::uint16_t infinity_bits = 255 << 7;

  bool any_tiny() const {
    if constexpr (fold > 1) {
      return seen_.any_below(tiny_bits);
    }
    return false;
  }

  const ForwardTask<S>& task_;
  const ForwardArgs& args_;
  bool loaded_ = false;
  Scalar (*element_)(const RowSource& source, std::int64_t row, std::int64_t column) = nullptr;
  typename Operands<S>::Magnitudes seen_;  // of the block's values
};

}  // namespace
}  // namespace headway::cpu
