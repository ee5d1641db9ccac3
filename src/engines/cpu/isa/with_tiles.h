// The kernels for AVX-512 with bf16 and tiles: those of avx512_bf16.cpp, but for what tiles do faster.
#pragma once

#include "engines/cpu/kernel/forward_pairs.h"
#include "engines/cpu/kernel/kernels.h"
#include "engines/cpu/simd/tiled_bf16.h"

namespace headway::cpu {
namespace {

// A kernel's function on a thread whose tiles are set up.
template <class Tiles, void (*run)(const ForwardArgs&, void*)>
void run_with_tiles(const ForwardArgs& args, void* scratch) {
  const typename Tiles::InUse in_use;
  run(args, scratch);
}

template <class Tiles>
Kernels kernels_with_tiles(const char* name) {
  using S = TiledBF16<Tiles>;
  Kernels kernels = avx512_bf16_kernels();
  kernels.name = name;
  ForwardKernel& forward = kernels.forward[static_cast<int>(Storage::bf16)];
  forward = forward_pairs_kernel<S, F32>();
  forward.run = run_with_tiles<Tiles, run_pairs<Forward, S, F32>>;
  forward.run_scores = run_with_tiles<Tiles, run_pairs<Scores, S, F32>>;
  return kernels;
}

}  // namespace
}  // namespace headway::cpu
