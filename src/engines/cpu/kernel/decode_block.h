// The current block of keys in a decode task: which of its keys the rows see, and its rows of K and V, in place or
// copied.
#pragma once

#include <cstdint>
#include <cstring>

#include "engines/cpu/kernel/decode_task.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_source.h"
#include "engines/cpu/kernel/stored_rows.h"

namespace headway::cpu {
namespace {

template <class S>
class DecodeBlock {
  static constexpr int lanes = S::lanes, tile = DecodeLayout<S>::tile;

 public:
  explicit DecodeBlock(const DecodeTask<S>& task) : task_(task), head_(task.head) {}

  std::int64_t begin = 0, end = 0;  // its keys; it begins at a multiple of stream_keys after the chunk's begin
  std::int64_t chunk_end = 0;

  // How many of `count` keys from `key` on go together: those of one run, which are read in place, unless runs are so
  // short that gathering several costs less than lanes without a key.
  static HEADWAY_INLINE std::int64_t keys_together(const RowSource& source, std::int64_t key, std::int64_t count) {
    return source.page_size >= lanes ? run_length(source, key, count) : count;
  }

  // Rows [first, first + count) of K or V, in place where they are one run with consecutive d. With a set of allowed
  // pairs the others' rows become 0.
  template <class In>
  HEADWAY_INLINE StoredRows<In> stored_rows(const RowSource& source, std::int64_t first, std::int64_t count,
                                            std::int64_t dim, const std::uint64_t* allowed = nullptr) const {
    if (source.rows.column_stride == 1 && allowed == nullptr && in_one_run(source, first, count)) {
      return rows_in_place<In>(source, first);
    }
    return copied_rows<In>(source, first, count, dim, allowed);
  }

  // What a task reads after the hull's keys, and after its values.
  template <class In>
  Ahead after_keys(const Range& hull) const {
    return rows_from<In>(head_.value, hull, head_.value_dim);
  }
  template <class In>
  Ahead after_values() const {
    if (end < chunk_end) {
      return rows_from<In>(head_.key, {end, chunk_end}, head_.head_dim);
    }
    return ahead_of<In>(task_.args.next_key, head_.key.rows, task_.args.chunk_keys, head_.head_dim);
  }

  // The block's keys from the first to the last that a row may attend to; with spans also which few of them some row
  // sees.
  Range enter(std::int64_t first, std::int64_t last) {
    begin = first;
    end = last;
    const Range hull{larger(task_.hull.begin, begin), smaller(task_.hull.end, end)};
    if (head_.ranges.spans.data == nullptr || hull.begin >= hull.end) {
      return hull;
    }
    return find_reached(hull) ? hull : Range{0, 0};
  }

  // Whether some row may see one of these keys of the block.
  HEADWAY_INLINE bool reaches(std::int64_t first, std::int64_t last) const {
    return head_.ranges.spans.data == nullptr ||
           any_bit(task_.at.reached, (first - begin) / summed, (last - 1 - begin) / summed + 1);
  }

  // The tiles that hold keys of the hull.
  std::int64_t first_tile(const Range& hull) const { return (hull.begin - begin) / tile; }
  std::int64_t end_tile(const Range& hull) const { return (hull.end - begin + tile - 1) / tile; }

 private:
  template <class In>
  HEADWAY_NOINLINE StoredRows<In> copied_rows(const RowSource& source, std::int64_t first, std::int64_t count,
                                              std::int64_t dim, const std::uint64_t* allowed) const {
    const auto hidden = [&](std::int64_t j) {
      const std::int64_t key = first + j - begin;
      return allowed != nullptr && (allowed[key / tile] >> (key % tile) & 1) == 0;
    };
    In* const copies = static_cast<In*>(task_.at.copy);
    each_run<In>(source, first, count, [&](const Matrix& run, std::int64_t done, std::int64_t rows) {
      const auto* data = static_cast<const In*>(run.data);
      for (std::int64_t r = 0; r < rows; ++r) {
        const bool zero = hidden(done + r);
        In* copy = copies + (done + r) * dim;
        if (run.column_stride == 1 && !zero) {
          std::memcpy(copy, data + r * run.row_stride, static_cast<std::size_t>(dim) * sizeof(In));
        } else {
          for (std::int64_t d = 0; d < dim; ++d) {
            copy[d] = zero ? In{} : data[r * run.row_stride + d * run.column_stride];
          }
        }
        if constexpr (is_scaled<In>) {
          task_.at.scale_copy[done + r] = zero ? 0 : scale_of(source, first + done + r);
        }
      }
    });
    if constexpr (is_scaled<In>) {
      return {copies, dim, task_.at.scale_copy, 1};
    } else {
      return {copies, dim};
    }
  }

  // Whether some row sees any of the hull.
  HEADWAY_NOINLINE bool find_reached(const Range& hull) {
    constexpr std::int64_t words = stream_keys / summed / 64;
    for (std::int64_t at = 0; at < words; ++at) {
      task_.at.reached[at] = 0;
    }
    for (int r = 0; r < task_.rows; ++r) {
      const Range inside{larger(task_.at.ranges[r].begin, hull.begin), smaller(task_.at.ranges[r].end, hull.end)};
      if (inside.begin < inside.end) {
        RowSpans(task_.head_of(r).ranges.spans, task_.query_of(r))
            .for_parts(inside, [&](const Range& part) HEADWAY_LAMBDA {
              set_bits(task_.at.reached, (part.begin - begin) / summed, (part.end - 1 - begin) / summed + 1);
            });
      }
    }
    return any_bit(task_.at.reached, 0, words * 64);
  }

  const DecodeTask<S>& task_;
  const ForwardArgs& head_;
};

}  // namespace
}  // namespace headway::cpu
