// Kernels for few keys, and for few queries over many keys on Hopper, whose operands go straight to registers: rows of
// whole aligned chunks of 16 bytes, no spans or pages; bf16 and f16, but for one.
#pragma once

#include "engines/cuda/kernels/direct_arguments.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

constexpr std::int64_t direct_most_keys = 256;
constexpr std::int64_t direct_most_steps = std::int64_t{1} << 22;  // elements from a row of K or V to the next

// `modified`: it has a softcap, mask, bias, ALiBi or dropout. `warps` of a block, at most, share what they read.
Launch direct_forward_launch(const ForwardArguments& arguments, DType dtype, bool modified, int warps);
cudaError_t launch_direct_forward(const Launch& launch, const DirectArguments& arguments, cudaStream_t stream);

// The warps of a block (1 to 16) and blocks of a cluster (1, 2, 4 or 8) that share the keys of a tile, 64 a warp.
struct DirectTeam {
  int warps, blocks;
};
Launch direct_decode_launch(const ForwardArguments& arguments, DType dtype, bool modified, DirectTeam team);
// The same of f32 in exact arithmetic, 32 keys a warp, and tiles of 1, 4 or 16 rows.
Launch exact_decode_launch(const ForwardArguments& arguments, DirectTeam team, std::int64_t rows);
cudaError_t launch_direct_decode(const Launch& launch, const DirectArguments& arguments, cudaStream_t stream);

}  // namespace headway::cuda
