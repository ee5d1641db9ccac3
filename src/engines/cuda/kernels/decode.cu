#include "engines/cuda/kernels/decode.cuh"
#include "engines/cuda/kernels/decode_kernels.h"
#include "engines/cuda/kernels/decode_launch.cuh"
#include "engines/cuda/kernels/merge_splits.cuh"

namespace headway::cuda {
namespace {

// Along each axis a kernel loops over what is left.
dim3 grid(std::int64_t x, std::int64_t y, std::int64_t z) {
  const auto bounded = [](std::int64_t size) { return static_cast<unsigned>(size < 65535 ? size : 65535); };
  return {static_cast<unsigned>(x), bounded(y), bounded(z)};
}

}  // namespace

cudaError_t launch_merge_splits(const MergeArguments& arguments, DecodeTypes types, bool early, cudaStream_t stream) {
  cudaLaunchAttribute attribute = early_start();
  cudaLaunchConfig_t config{};
  const bool few = is_merged_by_warps(arguments.split.splits, arguments.value_dim);
  constexpr std::int64_t warps = merge_threads / 32;
  config.gridDim = few ? grid(blocks(arguments.query_len * arguments.heads, warps), 1, arguments.batch)
                       : grid(arguments.query_len, arguments.heads, arguments.batch);
  config.blockDim = dim3(merge_threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  const auto merge = [&]<class T, class Stored>() {
    return few ? cudaLaunchKernelEx(&config, merge_few_splits<T, Stored>, arguments)
               : cudaLaunchKernelEx(&config, merge_splits<T, Stored>, arguments);
  };
  const auto launch = [&]<class T>() {
    switch (types.stored) {
      case DType::i8: return merge.template operator()<T, std::int8_t>();
      case DType::f8e4m3: return merge.template operator()<T, float8_e4m3>();
      default: return merge.template operator()<T, T>();
    }
  };
  return types.dtype == DType::bf16 ? launch.template operator()<bfloat16>() : launch.template operator()<float16>();
}

Launch decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return decode_launch_of<Decode<T, Depth, CopiedFeed<T, Depth, false>>>("decode on tensor cores",
                                                                           decode<T, Depth, false>, arguments, splits);
  });
}

cudaError_t launch_decode(const Launch& launch, const DecodeArguments& arguments, DecodeTypes types, bool early_merge,
                          cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(arguments.cluster);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid(launch.splits * launch.row_tiles, arguments.kv_heads, arguments.batch);
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = arguments.cluster > 1 ? 1 : 0;
  void* parameters[] = {const_cast<DecodeArguments*>(&arguments)};
  const cudaError_t result = cudaLaunchKernelExC(&config, launch.kernel, parameters);
  if (result != cudaSuccess || launch.splits == 1 || arguments.cluster > 1) {
    return result;
  }
  return launch_merge_splits({arguments, arguments.split}, types, early_merge, stream);
}

}  // namespace headway::cuda
