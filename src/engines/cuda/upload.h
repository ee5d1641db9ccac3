// Sends a few host numbers along with a call, without waiting and without keeping the host's memory busy.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace headway::cuda {

cudaError_t upload(const std::int64_t* values, std::size_t count, std::int64_t* target, cudaStream_t stream);

// The same for an even number of i32.
cudaError_t upload(const std::int32_t* values, std::size_t count, std::int32_t* target, cudaStream_t stream);

}  // namespace headway::cuda
