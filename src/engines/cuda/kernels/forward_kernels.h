// Forward kernels for calls that the usual ones of kernels.h would not do well enough.
#pragma once

#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

// f64 with sums that do not drift; kernels.h has the one for f32.
Launch simt_compensated_f64_launch(const ForwardArguments& arguments);

// f32 on tensor cores, each number in three parts; head dims up to mma_widest.
Launch split_forward_launch(const ForwardArguments& arguments);
Launch hopper_split_forward_launch(const ForwardArguments& arguments);  // on compute capability 9.0

// For scales far from 1, of every type; keys and values of the same, or `stored` in 8-bit pages.
Launch plain_forward_launch(const ForwardArguments& arguments, DType dtype, DType stored);
cudaError_t launch_plain_forward(const Launch& launch, const ForwardArguments& arguments, DType dtype,
                                 cudaStream_t stream);

}  // namespace headway::cuda
