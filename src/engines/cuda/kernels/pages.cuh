// Where keys and values in pages lie. A table in device memory was not checked on the host: what it says is cut here,
// so that no address lies outside of the pages.
#pragma once

#include "engines/cuda/arguments.h"
#include "engines/cuda/key_range.cuh"

namespace headway::cuda {

// The page of a table entry.
__device__ inline int page_at(const PageArguments& pages, std::int64_t b, std::int64_t entry) {
  const int page = __ldg(pages.table + b * pages.sequence_step + entry * pages.entry_step);
  return min(max(page, 0), pages.count - 1);
}

// Where a key lies. Calls have fewer than 2^31 keys a sequence (cuda_engine.cpp).
struct PageSlot {
  int page, slot;
};

// `key` is one of the sequence's.
__device__ inline PageSlot slot_of(const PageArguments& pages, std::int64_t b, std::int64_t key) {
  const auto at = static_cast<unsigned>(key), size = static_cast<unsigned>(pages.size);
  const unsigned entry = at / size;
  return {page_at(pages, b, entry), static_cast<int>(at - entry * size)};
}

// The element at which row `key` of a sequence's keys or values begins, in one tensor or in pages.
__device__ inline std::int64_t key_offset(const Arguments& args, const Rows& view, const Sequence& sequence,
                                          std::int64_t b, std::int64_t g, std::int64_t key) {
  if (args.pages.table == nullptr) {
    return b * view.batch + g * view.head + (sequence.key_begin + key) * view.row;
  }
  const PageSlot at = slot_of(args.pages, b, key);
  return std::int64_t{at.page} * view.batch + g * view.head + at.slot * view.row;
}

__device__ inline float scale_at(const PageScales& scales, std::int64_t g, const PageSlot& at) {
  return scales.data[std::int64_t{at.page} * scales.page + g * scales.head + at.slot * scales.slot];
}

}  // namespace headway::cuda
