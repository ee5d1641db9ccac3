// The parameters that a layer's config describes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "headway/layer.h"

namespace headway {

// One parameter: its name, and what its random draw depends on.
struct ParameterSpec {
  std::string name;
  std::uint32_t number = 0;  // W_q 0, W_k 1, W_v 2, W_o 3, b_q 4, ... b_o 7
  Dims sizes;                // [in,out], or [out] for a bias
  std::int64_t inputs = 0;   // of the linear map that it belongs to
  std::int64_t outputs = 0;

  bool is_bias() const { return sizes.size() == 1; }
};

// The config with every 0 replaced by its default; InvalidArgument if the numbers contradict each other or a parameter
// would pass 2^63 bytes. Allocates nothing: the config may come from a hostile file.
MultiHeadAttentionConfig resolved(MultiHeadAttentionConfig config);

// The parameters of a resolved config, in the layer's order.
std::vector<ParameterSpec> parameter_specs(const MultiHeadAttentionConfig& config);

}  // namespace headway
