#include "engines/cuda/kernels/decode.cuh"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth>
Launch chosen(const ForwardArguments& arguments, std::int64_t splits) {
  static_assert(Decode<T, Depth>::rows == decode_rows && mma_rows == decode_keys);
  Launch launch;
  launch.name = "decode on tensor cores";
  launch.kernel = reinterpret_cast<const void*>(decode<T, Depth>);
  launch.threads = mma_threads;
  launch.shared_bytes = Decode<T, Depth>::shared_bytes();
  launch.query_block = decode_rows;
  launch.key_block = decode_keys;
  launch.stages = Decode<T, Depth>::stages;
  launch.splits = splits;
  launch.tasks = arguments.batch * arguments.kv_heads * splits;
  return launch;
}

}  // namespace

Launch decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_half_type(dtype, widest(arguments),
                      [&]<class T, int Depth>() { return chosen<T, Depth>(arguments, splits); });
}

cudaError_t launch_decode(const Launch& launch, const DecodeArguments& arguments, DType dtype, cudaStream_t stream) {
  DecodeArguments copy = arguments;
  void* parameters[] = {&copy};
  const cudaError_t result =
      cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                       launch.shared_bytes, stream);
  return result == cudaSuccess ? launch_merge(arguments, dtype, stream) : result;
}

cudaError_t launch_merge(const DecodeArguments& arguments, DType dtype, cudaStream_t stream) {
  if (arguments.splits == 1) {
    return cudaSuccess;
  }
  const std::int64_t rows = arguments.batch * arguments.heads * arguments.query_len;
  if (dtype == DType::bf16) {
    merge_splits<bfloat16><<<grid(rows), merge_threads, 0, stream>>>(arguments);
  } else {
    merge_splits<float16><<<grid(rows), merge_threads, 0, stream>>>(arguments);
  }
  return cudaGetLastError();
}

}  // namespace headway::cuda
