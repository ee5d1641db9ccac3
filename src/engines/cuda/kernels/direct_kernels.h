// Kernels whose operands go straight to registers, without spans or pages: few queries and keys of bf16 and f16 in rows
// of whole aligned chunks of 16 bytes, and few queries over many keys of f32 on Hopper.
#pragma once

#include "engines/cuda/kernels/direct_arguments.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

constexpr std::int64_t direct_most_keys = 32, direct_most_queries = 32;
constexpr std::int64_t direct_most_steps = std::int64_t{1} << 22;  // elements from a row of K or V to the next

// `modified`: it has a softcap, mask, bias, ALiBi or dropout. `warps` of a block, at most, share what they read.
Launch direct_forward_launch(const ForwardArguments& arguments, DType dtype, bool modified, int warps);
cudaError_t launch_direct_forward(const Launch& launch, const DirectArguments& arguments, cudaStream_t stream);

// The warps of a block (1 to 16) and blocks of a cluster (1, 2, 4 or 8) that share the keys of a tile, 32 a warp.
struct DirectTeam {
  int warps, blocks;
};
// f32 in exact arithmetic, in tiles of 1, 4 or 16 rows.
Launch exact_decode_launch(const ForwardArguments& arguments, DirectTeam team, std::int64_t rows);
cudaError_t launch_exact_decode(const Launch& launch, const DirectArguments& arguments, cudaStream_t stream);

}  // namespace headway::cuda
