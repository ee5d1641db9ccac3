// Adds up the parts of dK and dV that teams of query heads found (hopper_backward.cuh), in their order. Memory bounds
// it: each number is read once.
#include "engines/cuda/kernels/hopper_backward_kernels.h"
#include "engines/cuda/kernels/hopper_finish.cuh"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

constexpr int threads = 256;

// The parts of one gradient: [heads * parts, keys, columns].
struct Parts {
  const float* sums;
  Rows gradient;
  std::int64_t kv_heads, keys, columns;
  int parts;
};

// Eight columns of a key.
template <class Half>
__device__ __forceinline__ void add_parts(const Parts& all, std::int64_t task) {
  const std::int64_t eights = all.columns / 8;
  const std::int64_t row = task / eights, column = task % eights * 8;
  const std::int64_t head = row / all.keys, key = row % all.keys;  // of all batch items
  const float* from = all.sums + ((head * all.parts) * all.keys + key) * all.columns + column;
  float sums[8] = {};
#pragma unroll 4
  for (int part = 0; part < all.parts; ++part) {
    const auto* eight = reinterpret_cast<const float4*>(from + part * all.keys * all.columns);
    const float4 low = eight[0], high = eight[1];
    sums[0] += low.x, sums[1] += low.y, sums[2] += low.z, sums[3] += low.w;
    sums[4] += high.x, sums[5] += high.y, sums[6] += high.z, sums[7] += high.w;
  }
  Half* to = static_cast<Half*>(all.gradient.data) + column +
             row_offset(all.gradient, head / all.kv_heads, head % all.kv_heads, key);
  *reinterpret_cast<uint4*>(to) = {ptx::packed_pair<Half>(sums[0], sums[1]), ptx::packed_pair<Half>(sums[2], sums[3]),
                                   ptx::packed_pair<Half>(sums[4], sums[5]), ptx::packed_pair<Half>(sums[6], sums[7])};
}

// A row of blocks for each gradient.
template <class Half>
__global__ void __launch_bounds__(threads)
    add_backward_parts(const __grid_constant__ Parts keys, const __grid_constant__ Parts values, std::int64_t heads) {
  const Parts& all = blockIdx.y == 0 ? keys : values;
  if (all.gradient.data == nullptr) {
    return;
  }
  const std::int64_t tasks = heads * all.keys * (all.columns / 8);
  for (std::int64_t task = std::int64_t{blockIdx.x} * threads + threadIdx.x; task < tasks;
       task += std::int64_t{gridDim.x} * threads) {
    add_parts<Half>(all, task);
  }
}

}  // namespace

cudaError_t launch_backward_parts(const HopperBackwardArguments& arguments, DType dtype, int parts,
                                  cudaStream_t stream) {
  const auto parts_of = [&](const float* sums, const Rows& gradient, std::int64_t columns) {
    return Parts{sums, gradient, arguments.kv_heads, arguments.key_len, columns, parts};
  };
  const Parts keys = parts_of(arguments.key_parts, arguments.key_gradient, arguments.head_dim);
  const Parts values = parts_of(arguments.value_parts, arguments.value_gradient, arguments.value_dim);
  const std::int64_t heads = arguments.batch * arguments.kv_heads;
  constexpr std::int64_t most_blocks = 65536;
  const std::int64_t tasks = heads * arguments.key_len * 32, wanted = (tasks + threads - 1) / threads;
  const dim3 grid(static_cast<unsigned>(wanted < most_blocks ? wanted : most_blocks), 2);
  if (dtype == DType::bf16) {
    add_backward_parts<bfloat16><<<grid, threads, 0, stream>>>(keys, values, heads);
  } else {
    add_backward_parts<float16><<<grid, threads, 0, stream>>>(keys, values, heads);
  }
  return cudaGetLastError();
}

}  // namespace headway::cuda
