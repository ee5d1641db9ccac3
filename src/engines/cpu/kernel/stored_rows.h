// Rows of K or V in the type that they are stored in, as decode reads them: features in lanes, each converted to the
// compute type on its way into a register. 8-bit rows take their scale there too.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/row_source.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

template <class In>
constexpr bool is_scaled = std::is_same_v<In, int8> || std::is_same_v<In, float8>;

// Consecutive in d, `ld` elements apart.
template <class In, bool scaled = is_scaled<In>>
struct StoredRows {
  const In* data;
  std::int64_t ld;

  HEADWAY_INLINE StoredRows from(std::int64_t row, std::int64_t column = 0) const {
    return {data + row * ld + column, ld};
  }
  // What the elements of a row are multiplied by.
  template <class S>
  HEADWAY_INLINE typename S::Vector scaled_part(std::int64_t, typename S::Vector x) const {
    return x;
  }
};

template <class In>
struct StoredRows<In, true> {
  const In* data;
  std::int64_t ld;
  const float* scales;
  std::int64_t scale_ld;

  HEADWAY_INLINE StoredRows from(std::int64_t row, std::int64_t column = 0) const {
    return {data + row * ld + column, ld, scales + row * scale_ld, scale_ld};
  }
  template <class S>
  HEADWAY_INLINE typename S::Vector scaled_part(std::int64_t row, typename S::Vector x) const {
    return x * S::set(scales[row * scale_ld]);
  }
};

// The run of a source that begins at a row.
template <class In>
HEADWAY_INLINE StoredRows<In> rows_in_place(const RowSource& source, std::int64_t begin) {
  const Matrix run = run_at<In>(source, begin);
  const auto* data = static_cast<const In*>(run.data);
  if constexpr (is_scaled<In>) {
    const Slot at = slot_of(source, begin);
    return {data, run.row_stride, source.scales + at.page * source.scale_page_stride + at.slot * source.scale_stride,
            source.scale_stride};
  } else {
    return {data, run.row_stride};
  }
}

// The first of some rows, those of one run.
template <class In>
HEADWAY_INLINE Ahead rows_from(const RowSource& source, const Range& rows, std::int64_t columns) {
  return ahead_of<In>(run_at<In>(source, rows.begin).data, source.rows,
                      run_length(source, rows.begin, rows.end - rows.begin), columns);
}

// Rows that will be read soon, to be fetched into the second-level cache a row at a time while others are multiplied:
// no hardware sees the next page coming, nor rows with gaps between them. (In the first level rows that lie a power of
// two apart would share few sets, and requests in a burst would hold up the loads behind them.) Behind their end come
// the rows that the task reads next: of a few hundred keys a third would else be read unfetched.
template <class In>
class RowsAhead {
 public:
  RowsAhead(const RowSource& source, std::int64_t dim, const Range& rows, const Ahead& next)
      : source_(source), end_(rows.end), next_(next) {
    constexpr auto size = static_cast<std::int64_t>(sizeof(In));
    constexpr std::int64_t bytes_ahead = 16384, least_keys = 16, most_keys = 64;
    const bool hidden = source.table != nullptr || source.rows.row_stride != dim;
    if (hidden && source.rows.column_stride == 1 && dim > 0) {
      row_bytes_ = dim * size;
      ahead_ = smaller(larger(least_keys, smaller(most_keys, bytes_ahead / row_bytes_)), rows.end - rows.begin);
    }
  }

  bool any() const { return ahead_ != 0; }

  // What to fetch while `count` keys from `key` on are multiplied: as many rows, of one run. To be asked in order.
  HEADWAY_INLINE Ahead beside(std::int64_t key, std::int64_t count) {
    const std::int64_t begin = key + ahead_;
    if (begin >= end_) {
      const Ahead some{next_.first, next_.row_bytes, next_.bytes, smaller(count, next_.rows)};
      next_.first += some.rows * next_.row_bytes;
      next_.rows -= some.rows;
      return some;
    }
    constexpr auto size = static_cast<std::int64_t>(sizeof(In));
    const Matrix run = run_at<In>(source_, begin);
    return {static_cast<const char*>(run.data), run.row_stride * size, row_bytes_,
            run_length(source_, begin, smaller(count, end_ - begin))};
  }

 private:
  const RowSource& source_;
  std::int64_t end_;
  Ahead next_;  // what is left of them
  std::int64_t row_bytes_ = 0;
  std::int64_t ahead_ = 0;  // in keys; 0: the hardware sees them coming
};

// What tiles call before keys are multiplied: to fetch as many rows ahead, or nothing.
struct FetchRows {
  const Ahead& ahead;
  HEADWAY_INLINE void operator()(std::int64_t begin, std::int64_t count) const { ahead.fetch<2>(begin, count); }
};
struct FetchNothing {
  HEADWAY_INLINE void operator()(std::int64_t, std::int64_t) const {}
};

// What a dot product multiplies at once: a vector of the compute type or, for a vocabulary that multiplies pairs, a
// vector of pairs. A stored row is read where it lies; behind its end are zeros.
template <class S, class In, int fold = Operands<S>::fold>
struct DotOperand {
  static constexpr int size = S::lanes;
  HEADWAY_INLINE static auto load(const In* p) { return S::load_first(p, S::lanes); }
  HEADWAY_INLINE static auto load_part(const In* p, int count) { return S::load_first(p, count); }
};

template <class S, class In>
struct DotOperand<S, In, 2> {
  static constexpr int size = 2 * S::lanes;
  using Pair = typename Operands<S>::Scalar;
  HEADWAY_INLINE static auto load(const In* p) { return Operands<S>::load(reinterpret_cast<const Pair*>(p)); }
  HEADWAY_INLINE static auto load_part(const In* p, int count) { return Operands<S>::load_first(p, count); }
};

// One row of keys in a dot product.
template <class S, class In, bool scaled = is_scaled<In>>
struct KeyRow {
  const In* data;

  HEADWAY_INLINE KeyRow() = default;
  HEADWAY_INLINE KeyRow(const StoredRows<In>& keys, std::int64_t row) : data(keys.data + row * keys.ld) {}
  HEADWAY_INLINE auto load(std::int64_t d) const { return DotOperand<S, In>::load(data + d); }
  HEADWAY_INLINE auto load_part(std::int64_t d, int count) const {
    return DotOperand<S, In>::load_part(data + d, count);
  }
};

template <class S, class In>
struct KeyRow<S, In, true> {
  const In* data;
  typename S::Vector scale;

  HEADWAY_INLINE KeyRow() = default;
  HEADWAY_INLINE KeyRow(const StoredRows<In>& keys, std::int64_t row)
      : data(keys.data + row * keys.ld), scale(S::set(keys.scales[row * keys.scale_ld])) {}
  HEADWAY_INLINE auto load(std::int64_t d) const { return S::load_first(data + d, S::lanes) * scale; }
  HEADWAY_INLINE auto load_part(std::int64_t d, int count) const { return S::load_first(data + d, count) * scale; }
};

}  // namespace
}  // namespace headway::cpu
