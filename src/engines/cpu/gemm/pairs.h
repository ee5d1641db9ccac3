// The matrix product through bf16 dot products, where they are exact enough: the instruction takes denormals for 0, of
// its operands and of its sums. A row of `left` with tiny numbers goes through float products instead; `right`, and all
// of a transposed left, are looked at before the tasks start, since their numbers meet in every row.
#pragma once

#include <cstdint>

#include "engines/cpu/gemm/gemm.h"
#include "engines/cpu/kernels.h"

namespace headway::cpu {
namespace {

// The least number that goes through pairs, 2^-50, as the bits of a bf16: products are then at least 2^-100, and what
// sums below 2^-126 lose is less than 2^-26 of one of their terms.
constexpr unsigned least_paired = (127 - 50) << 7;

// Whether each number of rows begin .. end is 0, large enough, or not finite.
HEADWAY_NOINLINE bool rows_suit_pairs(const ItemRows<const void>& matrix, std::int64_t begin, std::int64_t end,
                                      std::int64_t columns) {
  for (std::int64_t r = begin; r < end; ++r) {
    const bfloat16* row = static_cast<const bfloat16*>(matrix.data) + r / matrix.per_item * matrix.item_stride +
                          r % matrix.per_item * matrix.row_stride;
    std::uint16_t least = 0xffff;  // magnitude - 1 of the least number that is not 0
    const auto look_at = [&](std::int64_t stride) HEADWAY_LAMBDA {
      for (std::int64_t c = 0; c < columns; ++c) {
        const auto below = static_cast<std::uint16_t>((row[c * stride].bits & 0x7fffu) - 1u);
        least = below < least ? below : least;
      }
    };
    matrix.column_stride == 1 ? look_at(1) : look_at(matrix.column_stride);
    if (least < least_paired - 1) {
      return false;
    }
  }
  return true;
}

// The choice is made for each row, so that it has the same bits in any batch.
template <class Pairs, class Plain>
void run_gemm_pairs(const GemmArgs& args, void* scratch) {
  const auto pairs = [&](std::int64_t row) {
    if (args.exact_products || args.left_transposed) {
      return !args.exact_products;
    }
    return args.paired_rows != nullptr ? args.paired_rows[row] != 0
                                       : rows_suit_pairs(args.left, row, row + 1, args.depth);
  };
  for (std::int64_t begin = args.row_begin, end = begin; begin < args.row_end; begin = end) {
    const bool through_pairs = pairs(begin);
    do {
      ++end;
    } while (end < args.row_end && pairs(end) == through_pairs);
    if (through_pairs) {
      Gemm<Pairs, bfloat16>(args, begin, end, scratch).run();
    } else {
      Gemm<Plain, bfloat16>(args, begin, end, scratch).run();
    }
  }
}

template <class Pairs, class Plain>
std::int64_t gemm_pairs_scratch(const GemmArgs& args) {
  return larger(Gemm<Pairs, bfloat16>::scratch_bytes(args), Gemm<Plain, bfloat16>::scratch_bytes(args));
}

template <class Pairs, class Plain>
constexpr GemmKernel gemm_pairs_kernel() {
  static_assert(Gemm<Pairs, bfloat16>::width == Gemm<Plain, bfloat16>::width);
  return {run_gemm_pairs<Pairs, Plain>, gemm_pairs_scratch<Pairs, Plain>, Gemm<Plain, bfloat16>::find_zero_rows,
          rows_suit_pairs, Gemm<Pairs, bfloat16>::width};
}

}  // namespace
}  // namespace headway::cpu
