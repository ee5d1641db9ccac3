#include <algorithm>

#include "engines/cuda/kernels/direct_kernels.h"
#include "engines/cuda/kernels/exact_decode.cuh"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

template <int Rows, bool Whole>
Launch chosen(const ForwardArguments& arguments, DirectTeam team) {
  const std::int64_t rows = arguments.group * arguments.query_len;
  const TeamShared shared{team.warps, static_cast<int>(std::min<std::int64_t>(rows, Rows)),
                          static_cast<int>(arguments.value_dim)};
  Launch launch;
  launch.name = "decode in exact f32";
  launch.kernel = reinterpret_cast<const void*>(exact_decode<Rows, Whole>);
  launch.threads = 32 * team.warps;
  launch.shared_bytes = sizeof(float) * static_cast<std::size_t>(ExactDecode<Rows, Whole>::floats(
                                            shared, static_cast<int>(arguments.head_dim)));
  launch.query_block = Rows;
  launch.key_block = exact_chunk;
  launch.stages = team.warps;  // each has a chunk on its way
  launch.splits = team.blocks;
  launch.row_tiles = blocks(rows, Rows);
  launch.tasks = arguments.batch * arguments.kv_heads * launch.row_tiles * team.blocks;
  return launch;
}

template <bool Whole>
Launch of_rows(const ForwardArguments& arguments, DirectTeam team, std::int64_t rows) {
  return rows == 1   ? chosen<1, Whole>(arguments, team)
         : rows == 4 ? chosen<4, Whole>(arguments, team)
                     : chosen<16, Whole>(arguments, team);
}

}  // namespace

Launch exact_decode_launch(const ForwardArguments& arguments, DirectTeam team, std::int64_t rows) {
  return arguments.key.chunks && arguments.value.chunks ? of_rows<true>(arguments, team, rows)
                                                        : of_rows<false>(arguments, team, rows);
}

cudaError_t launch_exact_decode(const Launch& launch, const DirectArguments& arguments, cudaStream_t stream) {
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
