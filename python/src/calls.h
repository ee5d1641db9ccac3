// The attention calls behind the Python functions, after their arguments have been read.
#pragma once

#include "arguments.h"

namespace headway::python {

// attention or attention_varlen: query, key, value[, cu_seqlens_q, cu_seqlens_k]; return_weights, return_lse, out.
Signature forward_signature(bool packed);

struct Results {
  nb::object out, weights, lse;  // null where they were not asked for
};
Results forward(const Arguments& arguments, bool packed);

// attention_backward or attention_varlen_backward: grad_out, query, key, value, out, lse[, cu_seqlens_q, cu_seqlens_k];
// gradients, bias_gradient.
Signature backward_signature(bool packed);

// The gradients of query, key, value, bias and sinks; None for those that are not given or not wanted.
nb::tuple backward(const Arguments& arguments, bool packed);

}  // namespace headway::python
