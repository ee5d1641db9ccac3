// What the weights of bf16 and f16 calls say, on tensor cores: analysis.cuh over mma_walk.cuh.
#include "engines/cuda/kernels/analysis.cuh"
#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_walk.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth>
__global__ void __launch_bounds__(mma_threads, 256 / Depth < 3 ? 256 / Depth : 3)
    mma_analysis(const __grid_constant__ AnalysisArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  analyze_chunks<MmaWalk<T, Depth>>(arguments, shared);
}

template <class T, int Depth>
Launch chosen(const AnalysisArguments& arguments) {
  Launch launch;
  launch.name = "tensor core analysis";
  launch.kernel = reinterpret_cast<const void*>(mma_analysis<T, Depth>);
  launch.threads = mma_threads;
  launch.shared_bytes = TileAnalysis<MmaWalk<T, Depth>>::shared_bytes(Depth);
  launch.tasks = arguments.head_count * arguments.chunks;
  return launch;
}

}  // namespace

Launch mma_analysis_launch(const AnalysisArguments& arguments, DType dtype) {
  return of_half_type(dtype, arguments.head_dim, [&]<class T, int Depth>() { return chosen<T, Depth>(arguments); });
}

}  // namespace headway::cuda
