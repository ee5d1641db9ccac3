// What the weights of bf16 and f16 calls say, on tensor cores: analysis.cuh over mma_walk.cuh.
#include "engines/cuda/kernels/analysis.cuh"
#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_walk.cuh"
#include "engines/cuda/kernels/simple_tiles.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth>
__global__ void __launch_bounds__(mma_threads, 256 / Depth < 3 ? 256 / Depth : 3)
    mma_analysis(const __grid_constant__ AnalysisArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  analyze_chunks<TileAnalysis<MmaWalk<T, Depth>>>(arguments, shared);
}

template <class T, int Depth>
__global__ void __launch_bounds__(mma_threads, simple_blocks<Depth>)
    mma_simple_analysis(const __grid_constant__ AnalysisArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  analyze_chunks<SimpleTiles<MmaWalk<T, Depth>>>(arguments, shared);
}

}  // namespace

Launch mma_analysis_launch(const AnalysisArguments& arguments, DType dtype) {
  return of_half_type(dtype, arguments.head_dim, [&]<class T, int Depth>() {
    return analysis_launch<TileAnalysis<MmaWalk<T, Depth>>>("tensor core analysis", mma_analysis<T, Depth>, arguments);
  });
}

Launch mma_simple_analysis_launch(const AnalysisArguments& arguments, DType dtype) {
  return of_half_type(dtype, arguments.head_dim, [&]<class T, int Depth>() {
    return analysis_launch<SimpleTiles<MmaWalk<T, Depth>>>("tensor core analysis of simple tiles",
                                                           mma_simple_analysis<T, Depth>, arguments);
  });
}

}  // namespace headway::cuda
