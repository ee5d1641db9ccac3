// The kernels as the host side calls them: what to launch, with how much shared memory, and the launches themselves. Each
// function is instantiated in the .cu file of its kernel, and nowhere else.
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
};

Launch simt_forward_launch(const ForwardArguments& arguments, DType dtype);
cudaError_t launch_simt_forward(const Launch& launch, const ForwardArguments& arguments, cudaStream_t stream);

}  // namespace headway::cuda
