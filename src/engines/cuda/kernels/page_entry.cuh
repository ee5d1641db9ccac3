// Keys to table entries and slots for kernels whose copies wait for them: without a division.
#pragma once

#include "engines/cuda/arguments.h"

namespace headway::cuda {

class PageEntries {
 public:
  __device__ __forceinline__ PageEntries(const PageArguments& pages, std::int64_t b)
      : pages_(pages), row_(pages.table + b * pages.sequence_step) {}

  // As the table says it. Whoever cuts it (inside) waits for it.
  __device__ __forceinline__ int load(int key) const { return __ldg(row_ + entry_of(key) * pages_.entry_step); }
  __device__ __forceinline__ int inside(int page) const { return min(max(page, 0), pages_.count - 1); }
  __device__ __forceinline__ int slot_of(int key) const { return key - entry_of(key) * pages_.size; }

 private:
  __device__ __forceinline__ int entry_of(int key) const {
    const auto at = static_cast<std::uint32_t>(key);
    return static_cast<int>((__umulhi(at, pages_.size_factor) + at) >> pages_.size_shift);
  }

  const PageArguments& pages_;
  const std::int32_t* row_;
};

}  // namespace headway::cuda
