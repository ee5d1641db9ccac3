// What kernels for coarse rows (plain_rows.cuh) have in common.
#pragma once

#include "engines/cuda/kernels/plain_rows.cuh"

namespace headway::cuda {

constexpr int coarse_threads = 256, coarse_warps = coarse_threads / 32;

// A block's work on one batch item; Args has its lse.
template <class T, class Args>
class CoarseBlock {
 protected:
  using Real = RealOf<T>;

  __device__ CoarseBlock(const Args& args, std::int64_t b)
      : args_(args), b_(b), lane_(static_cast<int>(threadIdx.x) % 32), warp_(static_cast<int>(threadIdx.x) / 32) {}

  // Of a row by its place on the S axis.
  __device__ Real lse_of(std::int64_t h, std::int64_t position) const {
    return head_of<Real>(args_.lse, b_, h)[position * args_.lse.row];
  }

  const Args& args_;
  const std::int64_t b_;
  const int lane_, warp_;
};

// launch(an element of the type)
template <class Launch>
cudaError_t with_element(DType dtype, const Launch& launch) {
  switch (dtype) {
    case DType::f64: return launch(double{});
    case DType::bf16: return launch(bfloat16{});
    case DType::f16: return launch(float16{});
    default: return launch(float{});
  }
}

}  // namespace headway::cuda
