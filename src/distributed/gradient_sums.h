// Gradients to which the rows of all ranks add.
#pragma once

#include "distributed/run.h"

namespace headway::distributed {

// The gradient of sinks [H], from the rows of all ranks.
void store_sink_gradient(const BackwardRun& run, const ConstTensorView& sinks, TensorView dsinks);

// `sums`, f64 and contiguous, is the contribution of this rank's pairs; with `of_all_ranks` the other ranks' are added.
void store_bias_gradient(Transport& transport, const Tensor& sums, bool of_all_ranks, TensorView dbias);

}  // namespace headway::distributed
