// Rows of K or V that decode reads soon, fetched while others are multiplied: no hardware prefetcher sees the next page
// coming, nor rows with gaps between them. Where heads are taken together, a token's rows of all of them lie side by
// side, and each head fetches its share of the next tokens in the order of memory: rows of 256 bytes that lie 8 KiB
// apart come at two thirds of the rate of memory that is read in order.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/decode_args.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_source.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// Keys that one head takes before the next one does: as many as values are added up in, if there is a next one.
constexpr std::int64_t step_keys_together = 16, step_keys_alone = 64;

// Rows to fetch beside as many others.
struct RowsToFetch {
  const char* const* rows;
  std::int64_t count;
  std::int64_t bytes;  // of each

  // Those beside the rows [begin, begin + n). In the first level rows that lie a power of two apart would share few
  // sets, and requests in a burst would hold up the loads behind them, so they go to the second.
  HEADWAY_INLINE void operator()(std::int64_t begin, std::int64_t n) const {
    for (std::int64_t r = begin; r < smaller(begin + n, count); ++r) {
      for (std::int64_t byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(rows[r] + byte, 0, 2);
      }
    }
  }
};

struct FetchNothing {
  HEADWAY_INLINE void operator()(std::int64_t, std::int64_t) const {}
};

template <class In>
class RowsAhead {
 public:
  // source(n) is where the rows of the n-th of the heads that are taken together lie; memory has them in this order.
  template <class Source>
  void start(int heads, const Source& source, std::int64_t dim, std::int64_t end) {
    source_ = &source(0);
    heads_ = heads;
    end_ = end;
    constexpr auto size = static_cast<std::int64_t>(sizeof(In));
    constexpr std::int64_t bytes_ahead = 16384, most_keys = 64;
    const bool hidden = heads > 1 || source_->table != nullptr || source_->rows.row_stride != dim;
    ahead_ = 0;
    if (hidden && source_->rows.column_stride == 1 && dim > 0) {
      row_bytes_ = dim * size;
      const std::int64_t keys = bytes_ahead / (row_bytes_ * heads);
      ahead_ = larger(step_keys_together, smaller(most_keys, keys / step_keys_together * step_keys_together));
    }
    for (int n = 0; n < heads; ++n) {
      offsets_[n] = static_cast<const char*>(source(n).rows.data) - static_cast<const char*>(source_->rows.data);
    }
  }

  bool any() const { return ahead_ != 0; }

  // The keys that all heads take next.
  void enter_step(std::int64_t begin, std::int64_t end) {
    step_ = begin;
    const Range next{begin + ahead_, smaller(end + ahead_, end_)};
    tokens_count_ = any() && next.begin < next.end ? next.end - next.begin : 0;
    each_run<In>(*source_, next.begin, tokens_count_,
                 [&](const Matrix& run, std::int64_t done, std::int64_t rows) HEADWAY_LAMBDA {
                   const In* row = static_cast<const In*>(run.data);
                   for (std::int64_t r = 0; r < rows; ++r) {
                     tokens_[done + r] = reinterpret_cast<const char*>(row + r * run.row_stride);
                   }
                 });
  }

  // What the head fetches while it multiplies `count` keys of the step from `key` on.
  HEADWAY_INLINE RowsToFetch beside(int head, std::int64_t key, std::int64_t count) {
    const auto heads = static_cast<std::uint32_t>(heads_);
    const auto first = static_cast<std::uint32_t>(head * step_keys_together * (heads_ > 1 ? 1 : 0) + (key - step_));
    std::int64_t token = heads_ > 1 ? first / heads : first;
    std::uint32_t of_head = heads_ > 1 ? first % heads : 0;
    std::int64_t found = 0;
    for (; found < count && token < tokens_count_; ++found) {
      rows_[found] = tokens_[token] + offsets_[of_head];
      if (++of_head == heads) {
        of_head = 0;
        ++token;
      }
    }
    return {rows_, found, row_bytes_};
  }

 private:
  const RowSource* source_ = nullptr;
  int heads_ = 1;
  std::int64_t end_ = 0;
  std::int64_t row_bytes_ = 0;
  std::int64_t ahead_ = 0;  // in keys; 0: the hardware sees them coming
  std::int64_t step_ = 0, tokens_count_ = 0;
  std::int64_t offsets_[most_heads_together];  // from the first head's row of a token to each one's
  const char* tokens_[step_keys_alone];        // the first head's rows of the tokens to fetch
  const char* rows_[step_keys_alone];
};

}  // namespace
}  // namespace headway::cpu
