// Steps of gradient descent for parameters in host memory, so that training needs no loop over elements:
//
//   Adam adam({.learning_rate = 1e-3});
//   layer.forward(x, x, x);
//   adam.step(layer, layer.backward(dy));
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "headway/cxx20.h"
#include "headway/io.h"
#include "headway/layer.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

using NamedParameters = std::vector<std::pair<std::string, TensorView>>;

struct SgdConfig {
  double learning_rate = 1e-2;
  double momentum = 0;      // in [0, 1): m = momentum m + g, and the step is along m
  double weight_decay = 0;  // adds weight_decay times the parameter to its gradient
};

struct AdamConfig {
  double learning_rate = 1e-3;
  double beta1 = 0.9;  // in [0, 1)
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;  // decoupled, as in AdamW: shrinks the parameter itself
};

// Use one optimiser for one set of parameters: it stores its running means by their names. Means are float64, and each
// step is rounded once to the parameter's type. A gradient that is missing or has another shape, type or device is an
// error before any parameter changes.
class Sgd {
 public:
  explicit Sgd(const SgdConfig& config = {});
  void step(const NamedParameters& parameters, const NamedTensors& gradients);
  void step(MultiHeadAttention& layer, const Gradients& gradients) { step(layer.parameters(), gradients.parameters); }

 private:
  SgdConfig config_;
  std::map<std::string, std::vector<double>> momenta_;
};

class Adam {
 public:
  explicit Adam(const AdamConfig& config = {});
  void step(const NamedParameters& parameters, const NamedTensors& gradients);
  void step(MultiHeadAttention& layer, const Gradients& gradients) { step(layer.parameters(), gradients.parameters); }

 private:
  struct Means {
    std::vector<double> of_gradients, of_squares;
  };
  AdamConfig config_;
  std::map<std::string, Means> means_;
  std::int64_t steps_ = 0;
};

}  // namespace headway
#pragma GCC visibility pop
