// The kernels for AVX-512 with bf16 and tiles: those of avx512_bf16.cpp, but for what tiles do faster.
#pragma once

#include "engines/cpu/gemm/pairs.h"
#include "engines/cpu/gemm/tile_gemm.h"
#include "engines/cpu/kernel/backward_pairs.h"
#include "engines/cpu/kernel/forward_pairs.h"
#include "engines/cpu/kernel/kernels.h"
#include "engines/cpu/simd/tiled_bf16.h"

namespace headway::cpu {
namespace {

// A kernel's function on a thread whose tiles are set up.
template <class Tiles, auto run, class... Args>
void run_with_tiles(Args... args) {
  const typename Tiles::InUse in_use;
  run(args...);
}

template <class Tiles>
Kernels kernels_with_tiles(const char* name) {
  using S = TiledBF16<Tiles>;
  static_assert(FloatVocabulary<S> && PairOperands<Operands<S>, S> && TileRegisters<Tiles>);
  Kernels kernels = avx512_bf16_kernels();
  kernels.name = name;
  constexpr auto bf16 = static_cast<int>(Storage::bf16);
  ForwardKernel& forward = kernels.forward[bf16];
  forward = forward_pairs_kernel<S, F32>();
  forward.run = run_with_tiles<Tiles, run_pairs<Forward, S, F32>, const ForwardArgs&, void*>;
  forward.run_scores = run_with_tiles<Tiles, run_pairs<Scores, S, F32>, const ForwardArgs&, void*>;
  BackwardKernel& backward = kernels.backward[bf16];
  backward = backward_pairs_kernel<S, F32>();
  backward.gradients = run_with_tiles<Tiles, run_gradients_pairs<S, F32>, const BackwardArgs&, int, void*>;
  GemmKernel& gemm = kernels.gemm[bf16];
  gemm = gemm_pairs_kernel<S, F32>();
  gemm.least_panels = 2;  // packing costs more beside products that are so fast, so tasks are few and have many rows
  gemm.tasks_of_a_thread = 3;
  gemm.run = run_with_tiles<Tiles, run_gemm_pairs<S, F32>, const GemmArgs&, void*>;
  return kernels;
}

}  // namespace
}  // namespace headway::cpu
