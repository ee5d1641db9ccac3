#include <algorithm>

#include "engines/cuda/kernels/direct_decode.cuh"
#include "engines/cuda/kernels/direct_kernels.h"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

template <class T, bool Modified>
Launch chosen(const ForwardArguments& arguments, DirectTeam team) {
  const std::int64_t rows = arguments.group * arguments.query_len;
  const TeamShared shared{team.warps, static_cast<int>(std::min<std::int64_t>(rows, direct_rows)),
                          static_cast<int>(arguments.value_dim), direct_features, false};
  Launch launch;
  launch.name = "decode, straight to registers";
  launch.kernel = reinterpret_cast<const void*>(direct_decode<T, Modified>);
  launch.threads = 32 * team.warps;
  launch.shared_bytes = sizeof(float) * static_cast<std::size_t>(DirectDecode<T, Modified>::floats(shared));
  launch.query_block = direct_rows;
  launch.key_block = direct_chunk;
  launch.stages = team.warps;  // each has a chunk on its way
  launch.splits = team.blocks;
  launch.row_tiles = blocks(rows, direct_rows);
  launch.tasks = arguments.batch * arguments.kv_heads * launch.row_tiles * team.blocks;
  return launch;
}

}  // namespace

Launch direct_decode_launch(const ForwardArguments& arguments, DType dtype, bool modified, DirectTeam team) {
  if (dtype == DType::bf16) {
    return modified ? chosen<bfloat16, true>(arguments, team) : chosen<bfloat16, false>(arguments, team);
  }
  return modified ? chosen<float16, true>(arguments, team) : chosen<float16, false>(arguments, team);
}

cudaError_t launch_direct_decode(const Launch& launch, const DirectArguments& arguments, cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(launch.splits);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.tasks));
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = launch.splits > 1 ? 1 : 0;
  void* parameters[] = {const_cast<DirectArguments*>(&arguments)};
  return cudaLaunchKernelExC(&config, launch.kernel, parameters);
}

}  // namespace headway::cuda
