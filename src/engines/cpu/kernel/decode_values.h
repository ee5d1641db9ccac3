// The output of a decode task's block of keys: o [rows][Dv] = p V, while V streams by.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/decode_block.h"
#include "engines/cpu/kernel/decode_task.h"
#include "engines/cpu/kernel/decode_tiles.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/stored_rows.h"
#include "engines/cpu/kernel/strips.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class DecodeValues {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes;

 public:
  DecodeValues(const DecodeTask<S>& task, const DecodeBlock<S>& block)
      : task_(task), block_(block), at_(task.at), head_(task.head) {}

  // outputs = p V over the hull for the rows [row_begin, row_end). With a set of allowed pairs the others' values count
  // as 0: their weights are 0, so that only NaN and infinity make a difference. `then` is what the task reads after
  // them.
  HEADWAY_NOINLINE void add(int row_begin, int row_end, const Range& hull, const std::uint64_t* allowed,
                            const Ahead& then) {
    constexpr std::int64_t part_keys = summed * summed;
    RowsAhead<In> ahead(head_.value, head_.value_dim, hull, then);
    bool first_part = true;
    for (std::int64_t part = hull.begin; part < hull.end;) {
      const std::int64_t part_end = next(part, part_keys, hull.end);
      Sum sum = Sum::starts;
      for (std::int64_t key = part; key < part_end;) {
        const std::int64_t end = next(key, summed, part_end);
        if (!block_.reaches(key, end)) {  // their weights are 0
          key = end;
          continue;
        }
        const StoredRows<In> values =
            block_.template stored_rows<In>(head_.value, key, end - key, head_.value_dim, allowed);
        if (!one_strip()) {
          touch(values, end - key);
        }
        std::int64_t d = 0;  // the column that is left to begin with
        if (ahead.any()) {
          d = first_strip(row_begin, row_end, key, end - key, values, sum, ahead.beside(key, end - key));
        }
        value_group(row_begin, row_end, key, end - key, values, d, sum);
        sum = Sum::continues;
        key = end;
      }
      part = part_end;
      if (sum == Sum::starts) {
        continue;
      }
      for (int r = row_begin; r < row_end; ++r) {
        add_part(r, first_part);
      }
      first_part = false;
    }
  }

  bool output_is_finite(int r) const {
    return rows_are_finite<S>({at_.outputs + r * at_.output_ld, at_.output_ld}, 0, 1, head_.value_dim);
  }

 private:
  static constexpr bool roomy = S::tile_scalars * S::panel_vectors >= 16;  // 32 registers

  bool one_strip() const {
    const std::int64_t dim = head_.value_dim;
    return roomy ? dim <= 8 * lanes : dim <= lanes || dim == 4 * lanes || dim == 8 * lanes;
  }

  // Reads whole rows in order, which memory streams to twice as fast as to one strip of each and then the next.
  void touch(const StoredRows<In>& values, std::int64_t keys) const {
    for (std::int64_t k = 0; k < keys; ++k) {
      for (std::int64_t d = 0; d < head_.value_dim; d += 64 / static_cast<std::int64_t>(sizeof(In))) {
        static_cast<void>(*reinterpret_cast<const volatile char*>(values.data + k * values.ld + d));
      }
    }
  }

  // The end of the step of `size` keys, counted from the block's begin, that `key` is in.
  std::int64_t next(std::int64_t key, std::int64_t size, std::int64_t end) const {
    return smaller(end, block_.begin + ((key - block_.begin) / size + 1) * size);
  }

  void add_part(int r, bool first) {
    for (std::int64_t d = 0; d < at_.output_ld; d += lanes) {
      const Vector part = S::load(at_.part_outputs + r * at_.output_ld + d);
      Scalar* at = at_.outputs + r * at_.output_ld + d;
      S::store(at, first ? part : S::load(at) + part);
    }
  }

  // How many rows go with 8 vectors of d.
  static constexpr int rows_of_8 = !roomy ? 1 : sizeof(In) < 4 ? 2 : 3;

  // A few keys for all rows, in strips of d that the registers hold. The first rows wait for memory, so as many as
  // possible come with them.
  HEADWAY_INLINE void value_group(int row_begin, int row_end, std::int64_t key, std::int64_t keys,
                                  const StoredRows<In>& values, std::int64_t d, Sum sum) {
    while (d < head_.value_dim) {
      d += with_strip(d, [&]<int NR, int NV>(Strip<NR>, Strip<NV>)
                             HEADWAY_LAMBDA { value_strip<NR, NV>(row_begin, row_end, key, keys, values, d, sum); });
    }
  }

  // body(how many rows, how many vectors) for the widest strip from column d on; gives its columns. Only an odd number
  // of vectors, so also a single one, may end in part of a vector.
  template <class Body>
  HEADWAY_INLINE std::int64_t with_strip(std::int64_t d, const Body& body) const {
    const std::int64_t left = head_.value_dim - d;
    const auto call = [&]<int NR, int NV>(Strip<NR> rows, Strip<NV> vectors) HEADWAY_LAMBDA -> std::int64_t {
      body(rows, vectors);
      return NV * lanes;
    };
    if (left >= 8 * lanes) {
      return call(Strip<rows_of_8>{}, Strip<8>{});
    }
    if constexpr (roomy) {
      if (left > 6 * lanes) {
        return call(Strip<2>{}, Strip<7>{});
      }
      if (left == 6 * lanes) {
        return call(Strip<2>{}, Strip<6>{});
      }
      if (left > 4 * lanes) {
        return call(Strip<2>{}, Strip<5>{});
      }
    }
    if (left >= 4 * lanes) {
      return call(Strip<2>{}, Strip<4>{});
    }
    if constexpr (roomy) {
      if (left > 2 * lanes) {
        return call(Strip<2>{}, Strip<3>{});
      }
      if (left == 2 * lanes) {
        return call(Strip<2>{}, Strip<2>{});
      }
    }
    return call(Strip<2>{}, Strip<1>{});
  }

  template <int NR, int NV>
  HEADWAY_NOINLINE void value_strip(int row_begin, int row_end, std::int64_t key, std::int64_t keys,
                                    const StoredRows<In>& values, std::int64_t d, Sum sum) {
    int r = row_begin;
    for (; r + NR <= row_end; r += NR) {
      add_rows<NR, NV>(r, key, keys, values, d, sum, FetchNothing{});
    }
    for (; NR > 1 && r < row_end; ++r) {
      add_rows<1, NV>(r, key, keys, values, d, sum, FetchNothing{});
    }
  }

  // The first strip of value_group, with rows ahead fetched beside the first rows; gives its end. Narrow heads are
  // left.
  HEADWAY_NOINLINE std::int64_t first_strip(int row_begin, int row_end, std::int64_t key, std::int64_t keys,
                                            const StoredRows<In>& values, Sum sum, const Ahead& ahead) {
    if (head_.value_dim < 4 * lanes) {
      return 0;
    }
    return with_strip(0, [&]<int NR, int NV>(Strip<NR>, Strip<NV>) HEADWAY_LAMBDA {
      int r = row_begin;
      if (r + NR <= row_end) {
        add_rows<NR, NV>(r, key, keys, values, 0, sum, FetchRows{ahead});
        r += NR;
      } else {
        add_rows<1, NV>(r, key, keys, values, 0, sum, FetchRows{ahead});
        ++r;
      }
      value_strip<NR, NV>(r, row_end, key, keys, values, 0, sum);
    });
  }

  template <int NR, int NV, class Fetch>
  HEADWAY_INLINE void add_rows(int r, std::int64_t key, std::int64_t keys, const StoredRows<In>& values, std::int64_t d,
                               Sum sum, const Fetch& fetch) {
    value_tile<S, In, NR, NV>(at_.scores_of(r) + (key - block_.begin), at_.score_ld, values.from(0, d), keys,
                              at_most(head_.value_dim - d - (NV - 1) * lanes, lanes),
                              at_.part_outputs + r * at_.output_ld + d, at_.output_ld, sum, fetch);
  }

  const DecodeTask<S>& task_;
  const DecodeBlock<S>& block_;
  const DecodeLayout<S> at_;
  const ForwardArgs& head_;
};

}  // namespace
}  // namespace headway::cpu
