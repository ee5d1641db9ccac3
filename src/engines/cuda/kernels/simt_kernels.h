// The exact forward kernel whose sums do not drift; the other exact kernels are in kernels.h.
#pragma once

#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

// f32 alone: out = sum of p v over the keys with compensated sums.
Launch simt_compensated_launch(const ForwardArguments& arguments);

}  // namespace headway::cuda
