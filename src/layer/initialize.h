// Drawing a layer's parameters from its seed.
#pragma once

#include <cstdint>

#include "headway/tensor.h"
#include "layer/config.h"

namespace headway {

// The parameter that the config's initializer and seed define; include/headway/layer.h says how.
Tensor draw_parameter(const ParameterSpec& spec, const MultiHeadAttentionConfig& config);

}  // namespace headway
