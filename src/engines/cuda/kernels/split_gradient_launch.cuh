// The kernel for gradients of f32 in three bf16 parts, and what to launch.
#pragma once

#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/split_gradient.cuh"

namespace headway::cuda {

template <int Depth>
constexpr int split_gradient_resident = Depth == 64 ? 2 : 1;  // blocks of a multiprocessor

// Takes the parameters of every gradient kernel; the last one, spans of features, is always 1.
template <class Gradient, bool KeysAreRows, int Resident>
__global__ void __launch_bounds__(Gradient::threads, Resident)
    split_gradient(const __grid_constant__ GradientArguments arguments, std::int64_t row_tiles, std::int64_t) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr std::uint32_t alignment = Gradient::alignment;
  Gradient gradient(arguments, shared + (alignment - ptx::shared_address(shared) % alignment) % alignment);
  const std::int64_t heads = KeysAreRows ? arguments.kv_heads : arguments.heads;
  const std::int64_t tasks = arguments.batch * heads * row_tiles * arguments.parts;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t whole = task / arguments.parts, head = whole / row_tiles, tile = whole % row_tiles;
    // When causal, late queries see the most keys and early keys are seen by the most queries: they start first.
    gradient.run(head / heads, head % heads, KeysAreRows ? tile : row_tiles - 1 - tile,
                 static_cast<int>(task % arguments.parts));
  }
}

template <class Products, int Depth, bool KeysAreRows, int Width = Depth>
Launch split_gradient_launch_of(const char* name, const GradientArguments& arguments) {
  using Gradient = SplitGradient<Products, Depth, KeysAreRows, Width>;
  constexpr int resident = split_gradient_resident<Depth>;
  Launch launch;
  launch.name = name;
  launch.kernel = reinterpret_cast<const void*>(split_gradient<Gradient, KeysAreRows, resident>);
  launch.threads = Gradient::threads;
  launch.shared_bytes = Gradient::shared_bytes(arguments);
  launch.query_block = KeysAreRows ? Gradient::cols : Gradient::rows;
  launch.key_block = KeysAreRows ? Gradient::rows : Gradient::cols;
  launch.stages = 2;
  launch.row_tiles = blocks(KeysAreRows ? arguments.key_len : arguments.query_len, Gradient::rows);
  launch.tasks =
      arguments.batch * (KeysAreRows ? arguments.kv_heads : arguments.heads) * launch.row_tiles * arguments.parts;
  launch.resident = resident;
  return launch;
}

}  // namespace headway::cuda
