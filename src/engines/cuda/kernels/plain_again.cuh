// How kernels for every type find the rows that have to be done again in plain arithmetic.
#pragma once

#include "engines/cuda/kernels/plain_forward.cuh"

namespace headway::cuda {

// Whether a row's sums are not finite although its scores may be, or all its scores are -inf although it sees keys.
// (Under a mask or bias scores of -inf are those of forbidden pairs alone: modifiers.cuh.)
template <class Real>
__device__ __forceinline__ bool needs_plain_row(const ForwardArguments& args, const RowSoftmax<Real>& row,
                                                const KeyRange& keys) {
  if (row.highest == -infinity<Real>()) {
    const bool all_allowed = args.mask.data == nullptr && args.bias.data == nullptr;
    return (all_allowed || row.total != row.total) && keys.begin < keys.end;
  }
  return row.highest > Limits<Real>::highest || row.all_vanish() || row.total != row.total;
}

// Value features [first, last) of row i, by all lanes of a warp; others may be written too, as they should be.
template <class T, class Stored = T>
__device__ __forceinline__ void attend_plainly(const ForwardArguments& args, std::int64_t b, std::int64_t h,
                                               std::int64_t i, std::int64_t first, std::int64_t last, int power = 0) {
#pragma unroll 1
  do {
    PlainRow<T, Stored>(ptx::hidden(args), b, h, i, first, static_cast<int>(threadIdx.x % 32), power).attend();
    first += PlainRow<T>::features;
  } while (first < last);
}

}  // namespace headway::cuda
