// Gradients to which the rows of all ranks add.
#pragma once

#include "distributed/run.h"

namespace headway::distributed {

// The gradient of sinks [H], from the rows of all ranks.
void store_sink_gradient(const BackwardRun& run, const ConstTensorView& sinks, TensorView dsinks);

// `sums`, f64 and contiguous, is what this rank's pairs add; with `of_all_ranks` those of the others come on top.
void store_bias_gradient(Transport& transport, const Tensor& sums, bool of_all_ranks, TensorView dbias);

}  // namespace headway::distributed
