// The kernels as the host side calls them: what to launch, with how much shared memory, and the launches themselves.
// Each function is instantiated in the .cu file of its kernel, and nowhere else.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engines/cuda/arguments.h"

namespace headway::cuda {

// A kernel that was chosen for a call. `tasks` blocks have work; a grid may be smaller, and then loops.
struct Launch {
  const char* name = "";
  const void* kernel = nullptr;
  int threads = 0;
  std::size_t shared_bytes = 0;
  std::int64_t query_block = 0, key_block = 0;
  std::int64_t row_tiles = 0;  // of the longest sequence
  std::int64_t spans = 1;      // value features are split over this many blocks
  std::int64_t tasks = 0;
  std::int64_t splits = 1;  // of the keys, over blocks whose results are merged
  int cluster = 1;          // blocks that run together and merge them
  int resident = 1;         // blocks that a multiprocessor is meant to hold
  int stages = 1;           // key tiles in flight
};

// Exact f32 or f64 arithmetic: every type, size and stride. Forward and backward kernels take the same parameters
// whatever their arithmetic, so that one function launches them.
Launch simt_forward_launch(const ForwardArguments& arguments, DType dtype);
Launch simt_compensated_launch(const ForwardArguments& arguments);  // f32 alone, with sums that do not drift
Launch simt_gradient_launch(const GradientArguments& arguments, DType dtype);
bool simt_has_both(const Arguments& arguments, DType dtype);  // whether one of its kernels has dk and dv
Launch simt_bias_gradient_launch(const BiasGradientArguments& arguments, DType dtype);
Launch simt_matrix_launch(const ScoresArguments& arguments, DType dtype);

// Tensor cores: bf16 and f16 with head dims up to mma_widest.
constexpr std::int64_t mma_widest = 256;
constexpr std::int64_t mma_both_widest = 128;  // up to here one kernel has the gradients of key and value
Launch mma_forward_launch(const ForwardArguments& arguments, DType dtype);
Launch mma_gradient_launch(const GradientArguments& arguments, DType dtype);
Launch split_gradient_launch(const GradientArguments& arguments, DType dtype);  // f32, in three bf16 parts
Launch hopper_split_gradient_launch(const GradientArguments& arguments,
                                    DType dtype);  // the same on compute capability 9.0
Launch mma_matrix_launch(const ScoresArguments& arguments, DType dtype);

cudaError_t launch_forward(const Launch& launch, const ForwardArguments& arguments, cudaStream_t stream);
cudaError_t launch_gradient(const Launch& launch, const GradientArguments& arguments, cudaStream_t stream);
// Adds up the parts of one gradient of f32.
cudaError_t launch_gradient_parts(const GradientPartsArguments& arguments, cudaStream_t stream);
cudaError_t launch_bias_gradient(const Launch& launch, const BiasGradientArguments& arguments, cudaStream_t stream);
cudaError_t launch_matrix(const Launch& launch, const ScoresArguments& arguments, cudaStream_t stream);

cudaError_t launch_row_deltas(const DeltaArguments& arguments, DType dtype, cudaStream_t stream);
constexpr int delta_rows_a_tile = 8;  // of CoarseRows::found
// Behind the gradient kernels, and before those of bias and sinks.
cudaError_t launch_coarse_gradients(const CoarseGradientArguments& arguments, DType dtype, int multiprocessors,
                                    cudaStream_t stream);
cudaError_t launch_sink_gradients(const SinkGradientArguments& arguments, DType dtype, cudaStream_t stream);

}  // namespace headway::cuda
