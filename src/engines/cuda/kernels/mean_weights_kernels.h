// The mean of the weights over the heads, as the host side calls it.
#pragma once

#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

struct MeanWeightsArguments : Arguments {
  Rows lse;     // [B,H,Sq], with the sink; f64 for f64 inputs, f32 otherwise
  Matrix mean;  // [B,Sq,Sk] in the inputs' type; it has no heads
  std::int64_t row_tiles, key_tiles;
};

// On tensor cores, and exact. Both count the tiles.
Launch mma_mean_weights_launch(MeanWeightsArguments& arguments, DType dtype);
Launch simt_mean_weights_launch(MeanWeightsArguments& arguments, DType dtype);
// Behind the one that was chosen: rows whose lse says too little.
cudaError_t launch_coarse_mean_weights(const MeanWeightsArguments& arguments, DType dtype, cudaStream_t stream);
cudaError_t launch_mean_weights(const Launch& launch, const MeanWeightsArguments& arguments, cudaStream_t stream);

}  // namespace headway::cuda
