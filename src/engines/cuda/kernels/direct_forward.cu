#include <algorithm>

#include "engines/cuda/kernels/direct_forward.cuh"
#include "engines/cuda/kernels/direct_kernels.h"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

template <class T, int Keys, bool Modified>
Launch chosen(const ForwardArguments& arguments, int warps) {
  Launch launch;
  warps = std::min(warps, direct_threads / 32);
  launch.name = "direct_forward";
  launch.kernel = reinterpret_cast<const void*>(direct_forward<T, Keys, Modified>);
  launch.threads = 32 * warps;
  launch.shared_bytes = sizeof(float) * DirectTile<T, Keys, Modified>::scratch * static_cast<std::size_t>(32 * warps);
  launch.query_block = direct_rows;
  launch.key_block = Keys;
  launch.row_tiles = blocks(arguments.group * arguments.query_len, direct_rows);
  launch.tasks = arguments.batch * arguments.kv_heads * launch.row_tiles;
  return launch;
}

template <class T, bool Modified>
Launch of_keys(const ForwardArguments& arguments, int warps) {
  return arguments.key_len <= 16 ? chosen<T, 16, Modified>(arguments, warps)
                                 : chosen<T, direct_most_keys, Modified>(arguments, warps);
}

}  // namespace

Launch direct_forward_launch(const ForwardArguments& arguments, DType dtype, bool modified, int warps) {
  if (dtype == DType::bf16) {
    return modified ? of_keys<bfloat16, true>(arguments, warps) : of_keys<bfloat16, false>(arguments, warps);
  }
  return modified ? of_keys<float16, true>(arguments, warps) : of_keys<float16, false>(arguments, warps);
}

cudaError_t launch_direct_forward(const Launch& launch, const DirectArguments& arguments, cudaStream_t stream) {
  DirectArguments copy = arguments;
  void* parameters[] = {&copy};
  const std::int64_t warps = launch.threads / 32;
  return cudaLaunchKernel(launch.kernel, grid(blocks(launch.tasks, warps)), dim3(static_cast<unsigned>(launch.threads)),
                          parameters, launch.shared_bytes, stream);
}

}  // namespace headway::cuda
