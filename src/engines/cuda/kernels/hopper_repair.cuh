// Adds to stored rows the values that are not finite: the guard took them out of blocks in which some row may not see
// them. Runs only where the guard found such a value.
#pragma once

#include "engines/cuda/kernels/hopper_finish.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"
#include "engines/cuda/kernels/hopper_matrix.cuh"
#include "engines/cuda/kernels/hopper_partial.cuh"
#include "engines/cuda/kernels/hopper_spans.cuh"
#include "engines/cuda/kernels/pages.cuh"

namespace headway::cuda {

template <bool spanned = false, int rows>
__device__ __forceinline__ bool is_allowed(const HopperArguments& args, const HopperPost<rows>& post, int tile_row,
                                           int key) {
  if (key < post.begin[tile_row] || key >= post.end[tile_row]) {
    return false;
  }
  if constexpr (spanned) {
    const HopperWork& work = post.work;
    return RowSpans(args.spans, work.batch, work.head, work.query_begin + work.row + tile_row).allows(key);
  }
  if (args.mask.data != nullptr &&
      static_cast<const std::uint8_t*>(args.mask.data)[matrix_offset(args.mask, post.work, tile_row, key)] == 0) {
    return false;
  }
  return args.bias.data == nullptr ||
         load_bias(args.bias, matrix_offset(args.bias, post.work, tile_row, key)) != minus_infinity;
}

// The 16 rows of a warp, from warp_row on. A lane owns columns lane, lane + 32, ... of the stored output, or of the
// sums of a split.
template <class Half, bool splits, bool spanned = false, int rows>
__device__ __forceinline__ void add_value(const HopperArguments& args, const HopperPost<rows>& post, int warp_row,
                                          int key, int column, float value) {
  const HopperWork& work = post.work;
  for (int row = warp_row; row < min(warp_row + 16, work.real_rows); ++row) {
    if (!is_allowed<spanned>(args, post, row, key)) {
      continue;
    }
    if constexpr (splits) {
      args.split.sums[partial_row(args, work, row) * sum_width(args.value_dim) + column] += value;
    } else {
      Half* out = static_cast<Half*>(args.out.data) + column +
                  row_offset(args.out, work.batch, work.head, work.query_begin + work.row + row);
      *out = element<Half>(number<float>(*out) + value);
    }
  }
}

// Where a row of values begins.
__device__ __forceinline__ std::int64_t value_offset(const HopperArguments& args, const HopperWork& work, int head,
                                                     int key) {
  if (args.pages.table == nullptr) {
    return row_offset(args.value, work.batch, head, work.key_begin + key);
  }
  const PageSlot at = slot_of(args.pages, work.batch, key);
  return row_offset(args.value, at.page, head, at.slot);
}

template <class Half, bool splits, int rows>
__device__ __forceinline__ void repair(const HopperArguments& args, const HopperPost<rows>& post, int warp_row,
                                       int keys, int lane) {
  __syncwarp();  // the rows that the other lanes stored
  const HopperWork& work = post.work;
  const int head = static_cast<int>(work.head / args.group);
#pragma unroll 1
  for (int n = work.blocks.first; n < work.blocks.last; ++n) {
    if (!args.masks_anywhere() && !work.blocks.is_edge(n)) {
      continue;
    }
#pragma unroll 1
    for (int key = n * keys; key < min((n + 1) * keys, work.key_count); ++key) {
      const Half* values = static_cast<const Half*>(args.value.data) + value_offset(args, work, head, key);
#pragma unroll 1
      for (int column = lane; column < args.value_dim; column += 32) {
        const float value = number<float>(values[column]);
        if (!isfinite(value)) {
          add_value<Half, splits>(args, post, warp_row, key, column, value);
        }
      }
    }
  }
}

// The same where rows have spans: of the blocks that they leave.
template <class Half, int keys, int rows>
__device__ __forceinline__ void repair_spans(const HopperArguments& args, const HopperPost<rows>& post,
                                             const SpanWork& spans, int warp_row, int lane) {
  __syncwarp();  // the rows that the other lanes stored
  const HopperWork& work = post.work;
  const Half* values = static_cast<const Half*>(args.value.data) +
                       row_offset(args.value, work.batch, work.head / args.group, work.key_begin);
  SpanBlocks<keys> blocks(args.spans, spans);
#pragma unroll 1
  for (int n = 0; n < work.blocks.last; ++n) {
    const SpanBlock block = blocks.next();
#pragma unroll 1
    for (int key = block.number * keys; block.edge && key < min((block.number + 1) * keys, work.key_count); ++key) {
#pragma unroll 1
      for (int column = lane; column < args.value_dim; column += 32) {
        const float value = number<float>(values[key * args.value.row + column]);
        if (!isfinite(value)) {
          add_value<Half, false, true>(args, post, warp_row, key, column, value);
        }
      }
    }
  }
}

}  // namespace headway::cuda
