#include "engines/cuda/kernels/hopper_decode.cuh"
#include "engines/cuda/kernels/hopper_kernels.h"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth>
Launch chosen(const ForwardArguments& arguments, std::int64_t splits) {
  using Kernel = Decode<T, Depth, BoxedFeed<Depth>>;
  static_assert(Kernel::rows == decode_rows && mma_rows == decode_keys);
  Launch launch;
  launch.name = "decode on tensor cores, bulk copies";
  launch.kernel = reinterpret_cast<const void*>(hopper_decode<T, Depth>);
  launch.threads = mma_threads;
  launch.shared_bytes = Kernel::shared_bytes();
  launch.query_block = decode_rows;
  launch.key_block = decode_keys;
  launch.stages = Kernel::stages;
  launch.splits = splits;
  launch.tasks = arguments.batch * arguments.kv_heads * splits;
  return launch;
}

}  // namespace

Launch hopper_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_half_type(dtype, widest(arguments),
                      [&]<class T, int Depth>() { return chosen<T, Depth>(arguments, splits); });
}

cudaError_t launch_hopper_decode(const Launch& launch, const HopperDecodeArguments& arguments, DType dtype,
                                 cudaStream_t stream) {
  HopperDecodeArguments copy = arguments;
  void* parameters[] = {&copy};
  const cudaError_t result =
      cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                       launch.shared_bytes, stream);
  return result == cudaSuccess ? launch_merge(arguments, dtype, stream) : result;
}

}  // namespace headway::cuda
