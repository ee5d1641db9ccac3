// A layer's parameters by name, and the projections that they form.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "headway/tensor.h"

namespace headway {

// The parameters of one linear map, or of several side by side.
struct Projection {
  ConstTensorView weight;  // [in,out]
  std::optional<ConstTensorView> bias;
};

class Parameters {
 public:
  using Named = std::vector<std::pair<std::string, TensorView>>;

  // In the order of parameter_specs(config).
  void add(const std::string& name, Tensor tensor);

  const Named& views() const { return views_; }
  TensorView required(const std::string& name) const;  // InvalidArgument, with the existing names

  // q, k, v or o.
  Projection projection(char letter) const;
  // Several projections as one; empty if their parameters are not adjacent in memory.
  std::optional<Projection> joined(std::string_view letters) const;

  // The same numbers on a device or in host memory. On a device the weights of projections whose inputs have the same
  // width are adjacent, so that one product computes them all.
  Parameters copied_to(Device device, void* stream) const;

 private:
  std::optional<TensorView> find(const std::string& name) const;

  std::vector<Tensor> memory_;
  Named views_;
};

}  // namespace headway
