// What the simple tiles of bf16 and f16 calls say on compute capability 9.0: simple_tiles.cuh over mma_walk.cuh, with
// the products of a warpgroup, which reads both operands from shared memory itself, once for all warps.
#include "engines/cuda/kernels/analysis.cuh"
#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_walk.cuh"
#include "engines/cuda/kernels/simple_tiles.cuh"
#include "engines/cuda/ptx/tma.cuh"
#include "engines/cuda/ptx/wgmma.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth>
struct WarpgroupProduct {
  static constexpr int panel_bytes = mma_rows * 128;  // of 64 columns

  struct Chunks {
    __device__ static int at(int row, int chunk) { return chunk / 8 * panel_bytes + chunk_at<64>(row, chunk % 8); }
  };

  __device__ static void arrived() { ptx::shared_writes_to_async_fence(); }

  __device__ static void run(const MmaThread&, const unsigned char* queries, const unsigned char* keys,
                             float (&scores)[8][4]) {
    const std::uint64_t a = ptx::tile_descriptor(ptx::shared_address(queries), 16);
    const std::uint64_t b = ptx::tile_descriptor(ptx::shared_address(keys), 16);
    float products[32];
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Depth / 16; ++k) {
      const int at = k / 4 * (panel_bytes >> 4) + k % 4 * 2;
      ptx::Wgmma<T, 64>::multiply(products, a + at, b + at, k != 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::touch(products);
#pragma unroll
    for (int slot = 0; slot < 32; ++slot) {
      scores[slot / 4][slot % 4] = products[slot];
    }
  }
};

template <class T, int Depth>
using Walk = MmaWalk<T, Depth, WarpgroupProduct<T, Depth>>;

template <class T, int Depth>
__global__ void __launch_bounds__(mma_threads, simple_blocks<Depth>)
    hopper_simple_analysis(const __grid_constant__ AnalysisArguments arguments) {
  extern __shared__ __align__(1024) unsigned char shared[];
  analyze_chunks<SimpleTiles<Walk<T, Depth>>>(arguments, shared);
}

}  // namespace

Launch hopper_simple_analysis_launch(const AnalysisArguments& arguments, DType dtype) {
  return of_half_type(dtype, arguments.head_dim, [&]<class T, int Depth>() {
    return analysis_launch<SimpleTiles<Walk<T, Depth>>>("warpgroup analysis of simple tiles",
                                                        hopper_simple_analysis<T, Depth>, arguments);
  });
}

}  // namespace headway::cuda
