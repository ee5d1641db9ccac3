// Rows of K or V that decode reads soon where kv heads take turns: each head fetches its share of the next keys' rows,
// of all heads, in the order of memory. Rows of one head alone, 128 bytes of each 4 KiB, come at half of that rate.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/decode_task.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_source.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

template <class In>
class HeadsAhead {
 public:
  // The rows of the first head's keys [begin, end), and the distance from each head's row to the next one's, in bytes.
  HeadsAhead(const RowSource& first, std::int64_t distance, int heads, const Range& keys)
      : source_(first), distance_(distance), heads_(static_cast<std::uint32_t>(heads)), last_(keys.end - 1) {}

  // `summed` rows for the head-th head to fetch while it takes its turn, as many keys from `key` on.
  HEADWAY_INLINE const char* const* beside(std::int64_t key, int head) {
    const std::uint32_t first = static_cast<std::uint32_t>(head) * summed;
    std::int64_t token = key + summed + first / heads_;
    std::uint32_t of_head = first % heads_;
    const char* row = row_of(token);
    for (int k = 0; k < summed; ++k) {
      rows_[k] = row + of_head * distance_;
      if (++of_head == heads_) {
        of_head = 0;
        row = row_of(++token);
      }
    }
    return rows_;
  }

 private:
  const char* row_of(std::int64_t key) const {
    return static_cast<const char*>(run_at<In>(source_, smaller(key, last_)).data);
  }

  const RowSource& source_;
  std::int64_t distance_;
  std::uint32_t heads_;
  std::int64_t last_;
  const char* rows_[summed];
};

}  // namespace
}  // namespace headway::cpu
