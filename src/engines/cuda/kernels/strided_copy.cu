// One thread an element, the last axis fastest: every element is read and written once. For layouts that no plain copy
// moves; divisions, not bytes, bound it.
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/strided_copy.h"

namespace headway::cuda {
namespace {

constexpr int threads = 256;

template <class Element>
__global__ void __launch_bounds__(threads) strided_copy(const __grid_constant__ StridedCopy copy) {
  const std::int64_t step = std::int64_t{gridDim.x} * threads;
  for (std::int64_t at = std::int64_t{blockIdx.x} * threads + threadIdx.x; at < copy.elements; at += step) {
    std::int64_t left = at, from = 0, to = 0;
    for (int axis = copy.rank - 1; axis >= 0; --axis) {
      const std::int64_t index = left % copy.sizes[axis];
      left /= copy.sizes[axis];
      from += index * copy.from_strides[axis];
      to += index * copy.to_strides[axis];
    }
    static_cast<Element*>(copy.to)[to] = static_cast<const Element*>(copy.from)[from];
  }
}

}  // namespace

cudaError_t launch_strided_copy(const StridedCopy& copy, cudaStream_t stream) {
  const dim3 blocks_of = grid(blocks(copy.elements, threads));
  switch (copy.element_bytes) {
    case 1: return start(strided_copy<std::uint8_t>, blocks_of, threads, stream, copy);
    case 2: return start(strided_copy<std::uint16_t>, blocks_of, threads, stream, copy);
    case 4: return start(strided_copy<std::uint32_t>, blocks_of, threads, stream, copy);
    default: return start(strided_copy<std::uint64_t>, blocks_of, threads, stream, copy);
  }
}

}  // namespace headway::cuda
