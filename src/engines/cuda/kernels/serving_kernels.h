// The kernels of RoPE and of a cache's appends.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "engines/cuda/arguments.h"
#include "headway/dtype.h"

namespace headway::cuda {

// Cosines and sines of positions, [positions, 2 pairs]: a position's cosines, then its sines, times the factor. f64
// where rows are, else f32.
struct TurnArguments {
  const double* frequencies;  // [pairs]
  Lengths positions;          // [positions], or [B,S] as batch and row steps
  std::int64_t rows;          // positions of each batch item
  std::int64_t batch;
  std::int64_t pairs;
  double factor;
  bool back, in_f64;
  void* table;
};
cudaError_t launch_turns(const TurnArguments& arguments, cudaStream_t stream);

// Rows x and out over up to 6 axes before those of the positions and the features.
struct RotateArguments {
  static constexpr int most_axes = 6;
  const void* x;
  void* out;
  const void* table;
  std::int64_t rows, width, pairs;  // rows: positions of a batch item
  std::int64_t batch, x_batch, out_batch;
  std::int64_t x_row, out_row, x_feature, out_feature;
  int axes;
  std::int64_t sizes[most_axes], x_steps[most_axes], out_steps[most_axes];
  std::int64_t heads;  // product of the sizes
  bool interleaved;
};
cudaError_t launch_rotate(const RotateArguments& arguments, DType dtype, cudaStream_t stream);

// Row t of a call, head h, to slot slots[t] of [slots, heads, width].
struct AppendArguments {
  const void* rows;
  std::int64_t each;  // rows of a batch item; row t begins at t / each * batch_step + t % each * row_step
  std::int64_t batch_step, row_step, head_step, feature_step;
  std::int64_t tokens, heads, width, pairs;
  const std::int64_t* slots;
  const void* table;  // of turns, or null
  void* pages;
  float* scales;
  bool interleaved;
};
cudaError_t launch_append(const AppendArguments& arguments, DType dtype, DType stored, cudaStream_t stream);

}  // namespace headway::cuda
