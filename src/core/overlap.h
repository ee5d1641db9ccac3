// Whether two views, or two elements of one view, share memory. Exact, not by bounding box: the slices of one packed
// buffer interleave without sharing a byte.
#pragma once

#include "headway/tensor.h"

namespace headway {

bool share_memory(ConstTensorView a, ConstTensorView b);
bool shares_memory_with_itself(ConstTensorView view);

}  // namespace headway
