// The mean of the weights in exact f32 or f64 arithmetic: mean_weights.cuh over simt_walk.cuh.
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mean_weights.cuh"
#include "engines/cuda/kernels/simt_walk.cuh"

namespace headway::cuda {
namespace {

// One tile of queries and keys, head by head.
template <class T>
class SimtHeads : public SimtWalk<T> {
 public:
  using Element = T;
  using Walk = SimtWalk<T>;
  using Walk::Walk;

  __device__ void start_rows(std::int64_t b, std::int64_t first, std::int64_t count) {
    this->start(b, 0, first, count);
    count_ = count;
  }

  // prepare(h) before the product of head h, visit(scores) after it.
  template <class Prepare, class Visit>
  __device__ void walk_heads(std::int64_t key, const Prepare& prepare, const Visit& visit) {
#pragma unroll 1
    for (std::int64_t h = 0; h < this->args_.heads; ++h) {
      this->start(this->b_, h, this->first_, count_);
      prepare(h);
      this->walk(Stage::weights, key, key + 1, [&](std::int64_t, typename Walk::Scores& scores) { visit(scores); });
    }
  }

 private:
  std::int64_t count_ = 0;
};

template <class T>
__global__ void __launch_bounds__(SimtWalk<T>::threads, 2)
    simt_mean_weights(const __grid_constant__ MeanWeightsArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  mean_weights_tiles<SimtHeads<T>>(arguments, shared);
}

template <class T>
Launch chosen(MeanWeightsArguments& arguments) {
  using Walk = SimtWalk<T>;
  Launch launch;
  launch.name = sizeof(RealOf<T>) == 4 ? "exact f32 mean weights" : "exact f64 mean weights";
  launch.kernel = reinterpret_cast<const void*>(simt_mean_weights<T>);
  launch.threads = Walk::threads;
  launch.shared_bytes = Walk::walk_bytes(arguments.head_dim);
  arguments.row_tiles = blocks(arguments.query_len, Walk::rows);
  arguments.key_tiles = blocks(arguments.key_len, Walk::keys);
  launch.tasks = arguments.batch * arguments.row_tiles * arguments.key_tiles;
  return launch;
}

}  // namespace

Launch simt_mean_weights_launch(MeanWeightsArguments& arguments, DType dtype) {
  switch (dtype) {
    case DType::f64: return chosen<double>(arguments);
    case DType::bf16: return chosen<bfloat16>(arguments);
    case DType::f16: return chosen<float16>(arguments);
    default: return chosen<float>(arguments);
  }
}

cudaError_t launch_mean_weights(const Launch& launch, const MeanWeightsArguments& arguments, cudaStream_t stream) {
  MeanWeightsArguments copy = arguments;
  void* parameters[] = {&copy};
  return cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                          launch.shared_bytes, stream);
}

}  // namespace headway::cuda
