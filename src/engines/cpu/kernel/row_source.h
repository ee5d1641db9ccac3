// Sources of rows: how kernels get rows [begin, begin + count) of one head's K or V as operands, wherever they lie and
// whatever type they have. A kernel asks here and computes no address itself, so a new kind of source (pages and 8-bit
// rows are two) is a field or two in RowSource and a case in this file.
//
// Rows at a constant stride are a run: all rows of a strided source, those of one page of a paged one.
// A run is a Matrix, which kernels read in place where its type and layout allow; what spans several runs is gathered
// into the block's copy in scratch. The operands are the same numbers either way, so no result depends on where rows
// lie.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// ---- Where rows lie ----

struct Slot {
  std::int64_t page, slot;
};

HEADWAY_INLINE Slot slot_of(const RowSource& source, std::int64_t row) {
  const std::int64_t n = source.page_shift >= 0 ? row >> source.page_shift : row / source.page_size;
  const std::int64_t at = n * source.table_stride;
  return {source.table_is_i64 ? static_cast<const std::int64_t*>(source.table)[at]
                              : static_cast<const std::int32_t*>(source.table)[at],
          row - n * source.page_size};
}

// How many of `count` rows from `begin` on are in one run.
HEADWAY_INLINE std::int64_t run_length(const RowSource& source, std::int64_t begin, std::int64_t count) {
  if (source.table == nullptr) {
    return count;
  }
  const std::int64_t slot = source.page_shift >= 0 ? begin & (source.page_size - 1) : begin % source.page_size;
  return smaller(count, source.page_size - slot);
}

// Whether they all are. No rows are no run: they have no place in any page.
HEADWAY_INLINE bool in_one_run(const RowSource& source, std::int64_t begin, std::int64_t count) {
  return source.table == nullptr || (count > 0 && run_length(source, begin, count) == count);
}

// The run that begins at row `begin`.
template <class In>
HEADWAY_INLINE Matrix run_at(const RowSource& source, std::int64_t begin) {
  const In* data = static_cast<const In*>(source.rows.data);
  if (source.table == nullptr) {
    data += begin * source.rows.row_stride;
  } else {
    const Slot at = slot_of(source, begin);
    data += at.page * source.page_stride + at.slot * source.rows.row_stride;
  }
  return {data, source.rows.row_stride, source.rows.column_stride};
}

// body(run, how many rows came before it, how many it has) for each run of the rows.
template <class In, class Body>
HEADWAY_INLINE void each_run(const RowSource& source, std::int64_t begin, std::int64_t count, const Body& body) {
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t rows = run_length(source, begin + done, count - done);
    body(run_at<In>(source, begin + done), done, rows);
    done += rows;
  }
}

HEADWAY_INLINE float scale_of(const RowSource& source, std::int64_t row) {
  const Slot at = slot_of(source, row);
  return source.scales[at.page * source.scale_page_stride + at.slot * source.scale_stride];
}

// Whether every block of the source's rows is one run of the kernel's own type.
HEADWAY_INLINE bool is_one_run(const RowSource& source) {
  return source.table == nullptr && source.scaled == ScaledAs::nothing;
}

// Whether rows lie whole pages apart, as those of a head in [B,S,H,D] often do. They share few sets of the first-level
// cache then, so that reading them again from a copy is faster, where many queries pay for it.
template <class In>
HEADWAY_INLINE bool rows_collide(const RowSource& source, std::int64_t columns) {
  constexpr std::int64_t page = 4096 / sizeof(In);  // in elements
  const std::int64_t stride = source.rows.row_stride;
  return is_one_run(source) && stride != 0 && stride % page == 0 && columns % page != 0;
}
constexpr std::int64_t copying_panels = 4;  // of queries, which pay for a copy

// ---- Rows as numbers of the compute type ----

// Calls body with a null pointer of the type of the source's 8-bit elements.
template <class Body>
HEADWAY_INLINE void with_scaled_type(ScaledAs scaled, const Body& body) {
  if (scaled == ScaledAs::int8) {
    body(static_cast<const int8*>(nullptr));
  } else {
    body(static_cast<const float8*>(nullptr));
  }
}

// Whether a vocabulary reads 8-bit rows: those of float do.
template <class S>
concept ReadsBytes = sizeof(typename S::Scalar) == sizeof(float);

// copy[r][c] = scale(begin + r) * element(begin + r, c), rows of the copy `columns` apart.
template <class S>
HEADWAY_NOINLINE void copy_scaled_rows(const RowSource& source, std::int64_t begin, std::int64_t count,
                                       std::int64_t columns, typename S::Scalar* copy) {
  with_scaled_type(source.scaled, [&]<class Byte>(const Byte*) {
    each_run<Byte>(source, begin, count, [&](const Matrix& run, std::int64_t done, std::int64_t rows) {
      for (std::int64_t r = 0; r < rows; ++r) {
        const Byte* row = static_cast<const Byte*>(run.data) + r * run.row_stride;
        const auto scale = S::set(scale_of(source, begin + done + r));
        for (std::int64_t c = 0; c < columns; c += S::lanes) {
          const int some = at_most(columns - c, S::lanes);
          S::store_first(copy + (done + r) * columns + c, some, scale * load_row<S>(row, run.column_stride, c, some));
        }
      }
    });
  });
}

// Rows of a source that broadcasts can read: in place where they are one run of the compute type, else a copy.
template <class S, class In>
HEADWAY_INLINE Rows<typename S::Scalar> readable_rows(const RowSource& source, std::int64_t begin, std::int64_t count,
                                                      std::int64_t columns, typename S::Scalar* copy) {
  if constexpr (ReadsBytes<S>) {
    if (source.scaled != ScaledAs::nothing) {
      copy_scaled_rows<S>(source, begin, count, columns, copy);
      return {copy, columns};
    }
  }
  if (in_one_run(source, begin, count)) {
    return readable_rows<S, In>(run_at<In>(source, begin), 0, count, columns, copy);
  }
  each_run<In>(source, begin, count, [&](const Matrix& run, std::int64_t done, std::int64_t rows) {
    copy_rows<S, In>(run, 0, rows, columns, copy + done * columns, columns);
  });
  return {copy, columns};
}

// One row, a few of its columns at a time.
template <class S, class In>
class SourceRow {
 public:
  HEADWAY_INLINE SourceRow(const RowSource& source, std::int64_t row) : source_(source), row_(row) {
    if (source.scaled == ScaledAs::nothing) {
      data_ = static_cast<const In*>(run_at<In>(source, row).data);
    }
  }
  HEADWAY_INLINE typename S::Vector part(std::int64_t column, int count) const {
    if constexpr (ReadsBytes<S>) {
      if (source_.scaled != ScaledAs::nothing) {
        return scaled_part(column, count);
      }
    }
    return load_row<S>(data_, source_.rows.column_stride, column, count);
  }

 private:
  HEADWAY_NOINLINE typename S::Vector scaled_part(std::int64_t column, int count) const {
    typename S::Vector result = S::zero();
    with_scaled_type(source_.scaled, [&]<class Byte>(const Byte*) {
      const auto* row = static_cast<const Byte*>(run_at<Byte>(source_, row_).data);
      result = S::set(scale_of(source_, row_)) * load_row<S>(row, source_.rows.column_stride, column, count);
    });
    return result;
  }

  const RowSource& source_;
  std::int64_t row_;
  const In* data_ = nullptr;
};

// ---- Rows by address, for packers that take several at once ----

// Rows [0, count) of a run, and those of any source by a list of their addresses.
template <class In>
struct RunRows {
  const In* first;
  std::int64_t row_stride;
  HEADWAY_INLINE const In* operator()(std::int64_t j) const { return first + j * row_stride; }
};
template <class In>
struct ListedRows {
  const void* const* list;
  HEADWAY_INLINE const In* operator()(std::int64_t j) const { return static_cast<const In*>(list[j]); }
};

// body(rows(j) -> address) for rows that are not scaled; `list` has room for `count` addresses where the source is no
// single run.
template <class In, class Body>
HEADWAY_INLINE void with_addresses(const RowSource& source, std::int64_t begin, std::int64_t count, const void** list,
                                   const Body& body) {
  if (in_one_run(source, begin, count)) {
    const Matrix run = run_at<In>(source, begin);
    body(RunRows<In>{static_cast<const In*>(run.data), run.row_stride});
    return;
  }
  each_run<In>(source, begin, count, [&](const Matrix& run, std::int64_t done, std::int64_t rows) {
    for (std::int64_t r = 0; r < rows; ++r) {
      list[done + r] = static_cast<const In*>(run.data) + r * run.row_stride;
    }
  });
  body(ListedRows<In>{list});
}

}  // namespace
}  // namespace headway::cpu
