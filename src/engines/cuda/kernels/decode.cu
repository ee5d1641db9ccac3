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

cudaError_t launch_merge_splits(const MergeArguments& arguments, DType dtype, bool early, cudaStream_t stream) {
  cudaLaunchAttribute attribute = early_start();
  cudaLaunchConfig_t config{};
  config.gridDim = grid(arguments.query_len, arguments.heads, arguments.batch);
  config.blockDim = dim3(merge_threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return dtype == DType::bf16 ? cudaLaunchKernelEx(&config, merge_splits<bfloat16>, arguments)
                              : cudaLaunchKernelEx(&config, merge_splits<float16>, arguments);
}

Launch decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return decode_launch_of<Decode<T, Depth, CopiedFeed<T, Depth>>>("decode on tensor cores", decode<T, Depth>,
                                                                    arguments, splits);
  });
}

cudaError_t launch_decode(const Launch& launch, const DecodeArguments& arguments, DType dtype, bool early_merge,
                          cudaStream_t stream) {
  DecodeArguments copy = arguments;
  void* parameters[] = {&copy};
  const cudaError_t result =
      cudaLaunchKernel(launch.kernel, grid(launch.splits * launch.row_tiles, arguments.kv_heads, arguments.batch),
                       dim3(static_cast<unsigned>(launch.threads)), parameters, launch.shared_bytes, stream);
  if (result != cudaSuccess || launch.splits == 1) {
    return result;
  }
  return launch_merge_splits({arguments, arguments.split}, dtype, early_merge, stream);
}

}  // namespace headway::cuda
