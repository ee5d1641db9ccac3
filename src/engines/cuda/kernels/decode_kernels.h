// The decode kernels: few query rows, in tiles of decode_rows with those of grouped heads, share a kv head; no mask,
// bias, ALiBi or dropout. One file for every chip, one for Hopper's copy engine.
#pragma once

#include "engines/cuda/kernels/decode_arguments.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

constexpr std::int64_t decode_rows = 16;
constexpr std::int64_t decode_keys = 64;  // of a tile

Launch decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits);
Launch hopper_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits);

// Types of queries and output, and of keys and values.
struct DecodeTypes {
  DType dtype, stored;
};

// Any of them, and what merges the splits. `early_merge`: its blocks may be set up before the splits are done (sm_90).
cudaError_t launch_decode(const Launch& launch, const DecodeArguments& arguments, DecodeTypes types, bool early_merge,
                          cudaStream_t stream);

// What merges the splits of any kernel, for `group` heads to a kv head in its rows.
cudaError_t launch_merge_splits(const MergeArguments& arguments, DecodeTypes types, bool early, cudaStream_t stream);

}  // namespace headway::cuda
