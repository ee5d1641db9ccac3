// What weights say, in exact f32 or f64 arithmetic: analysis.cuh over simt_walk.cuh.
#include "engines/cuda/kernels/analysis.cuh"
#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/simt_walk.cuh"

namespace headway::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(SimtWalk<T>::threads, 2)
    simt_analysis(const __grid_constant__ AnalysisArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  analyze_chunks<TileAnalysis<SimtWalk<T>>>(arguments, shared);
}

template <class T>
Launch chosen(const AnalysisArguments& arguments) {
  Launch launch;
  launch.name = sizeof(RealOf<T>) == 4 ? "exact f32 analysis" : "exact f64 analysis";
  launch.kernel = reinterpret_cast<const void*>(simt_analysis<T>);
  launch.threads = SimtWalk<T>::threads;
  launch.shared_bytes = TileAnalysis<SimtWalk<T>>::shared_bytes(arguments.head_dim);
  launch.tasks = arguments.head_count * arguments.chunks;
  return launch;
}

}  // namespace

Launch simt_analysis_launch(const AnalysisArguments& arguments, DType dtype) {
  switch (dtype) {
    case DType::f64: return chosen<double>(arguments);
    case DType::bf16: return chosen<bfloat16>(arguments);
    case DType::f16: return chosen<float16>(arguments);
    default: return chosen<float>(arguments);
  }
}

cudaError_t launch_analysis(const Launch& launch, const AnalysisArguments& arguments, cudaStream_t stream) {
  AnalysisArguments copy = arguments;
  void* parameters[] = {&copy};
  return cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                          launch.shared_bytes, stream);
}

}  // namespace headway::cuda
