// Gradient descent with momentum, and Adam.
#include "headway/optimizer.h"

#include <cmath>
#include <cstddef>
#include <string_view>

#include "core/elements.h"
#include "core/out_of_memory.h"
#include "core/text.h"

namespace headway {
namespace {

void check_share(std::string_view optimizer, const char* name, double value) {
  if (!(value >= 0 && value < 1)) {
    throw InvalidArgument(text(optimizer, ": expected ", name, " in [0, 1), found ", value));
  }
}

void check_not_negative(std::string_view optimizer, const char* name, double value) {
  if (!(value >= 0 && std::isfinite(value))) {
    throw InvalidArgument(text(optimizer, ": expected a finite ", name, " of 0 or more, found ", value));
  }
}

void check_gradient(std::string_view operation, const std::string& name, const TensorView& parameter,
                    const NamedTensors& gradients) {
  const auto found = gradients.find(name);
  if (found == gradients.end()) {
    throw InvalidArgument(text(operation, ": expected a gradient of ", name, ", found none"));
  }
  const Tensor& gradient = found->second;
  if (gradient.sizes() != parameter.sizes()) {
    throw InvalidArgument(
        text(operation, ": the gradient of ", name, " has shape ", gradient.sizes(), ", expected ", parameter.sizes()));
  }
  if (gradient.dtype() != parameter.dtype() || !is_float(parameter.dtype())) {
    throw TypeMismatch(text(operation, ": the gradient of ", name, " has type ", gradient.dtype(),
                            ", expected the parameter's, ", parameter.dtype(), ", and a float type"));
  }
  if (parameter.device() != Device{} || gradient.device() != Device{}) {
    throw Unsupported(text(operation, ": expected ", name, " and its gradient in host memory, found them on ",
                           parameter.device(), " and ", gradient.device()));
  }
}

// The offset of the element that is number `e` in row-major order.
std::int64_t offset_of(const TensorView& view, std::int64_t e) {
  std::int64_t offset = 0;
  for (int axis = view.rank() - 1; axis >= 0; --axis) {
    offset += e % view.size(axis) * view.stride(axis);
    e /= view.size(axis);
  }
  return offset;
}

// parameter = changed(parameter, gradient, number of the element), in float64, for each element.
template <class Changed>
void update(const TensorView& parameter, const Tensor& gradient, const Changed& changed) {
  const bool in_order = parameter.is_contiguous();
  with_float_type(parameter.dtype(), [&](auto element) {
    using T = decltype(element);
    auto* values = static_cast<T*>(parameter.data());
    const auto* slopes = static_cast<const T*>(gradient.data());
    for (std::int64_t e = 0; e < gradient.elements(); ++e) {
      T& value = values[in_order ? e : offset_of(parameter, e)];
      value =
          converted<T>(changed(converted<double>(value), converted<double>(slopes[e]), static_cast<std::size_t>(e)));
    }
  });
}

// The running numbers of one parameter: zeros before its first step, an error if its size changed since.
void resize_once(std::string_view operation, const std::string& name, std::vector<double>& numbers, std::int64_t size) {
  if (numbers.empty()) {
    numbers.resize(static_cast<std::size_t>(size));
  } else if (numbers.size() != static_cast<std::size_t>(size)) {
    throw InvalidArgument(text(operation, ": ", name, " had ", numbers.size(), " elements at the last step, found ",
                               size, "; each set of parameters needs an optimiser of its own"));
  }
}

}  // namespace

Sgd::Sgd(const SgdConfig& config) : config_(config) {
  check_not_negative("Sgd", "learning_rate", config.learning_rate);
  check_share("Sgd", "momentum", config.momentum);
  check_not_negative("Sgd", "weight_decay", config.weight_decay);
}

void Sgd::step(const NamedParameters& parameters, const NamedTensors& gradients) try {
  for (const auto& [name, parameter] : parameters) {
    check_gradient("Sgd::step", name, parameter, gradients);
    if (config_.momentum > 0) {
      resize_once("Sgd::step", name, momenta_[name], parameter.elements());
    }
  }
  for (const auto& [name, parameter] : parameters) {
    double* momentum = config_.momentum > 0 ? momenta_[name].data() : nullptr;
    update(parameter, gradients.at(name), [&](double value, double slope, std::size_t e) {
      double along = slope + config_.weight_decay * value;
      if (momentum != nullptr) {
        along = momentum[e] = config_.momentum * momentum[e] + along;
      }
      return value - config_.learning_rate * along;
    });
  }
} catch (...) {
  throw_own_error("Sgd::step");
}

Adam::Adam(const AdamConfig& config) : config_(config) {
  check_not_negative("Adam", "learning_rate", config.learning_rate);
  check_share("Adam", "beta1", config.beta1);
  check_share("Adam", "beta2", config.beta2);
  check_not_negative("Adam", "epsilon", config.epsilon);
  check_not_negative("Adam", "weight_decay", config.weight_decay);
}

void Adam::step(const NamedParameters& parameters, const NamedTensors& gradients) try {
  for (const auto& [name, parameter] : parameters) {
    check_gradient("Adam::step", name, parameter, gradients);
    resize_once("Adam::step", name, means_[name].of_gradients, parameter.elements());
    resize_once("Adam::step", name, means_[name].of_squares, parameter.elements());
  }
  ++steps_;
  // Means that began at 0 are too small by these factors.
  const double seen1 = 1 - std::pow(config_.beta1, static_cast<double>(steps_));
  const double seen2 = 1 - std::pow(config_.beta2, static_cast<double>(steps_));
  for (const auto& [name, parameter] : parameters) {
    Means& means = means_[name];
    update(parameter, gradients.at(name), [&](double value, double slope, std::size_t e) {
      double& mean = means.of_gradients[e];
      double& square = means.of_squares[e];
      mean += (1 - config_.beta1) * (slope - mean);
      square += (1 - config_.beta2) * (slope * slope - square);
      const double step = mean / seen1 / (std::sqrt(square / seen2) + config_.epsilon);
      return value - config_.learning_rate * (step + config_.weight_decay * value);
    });
  }
} catch (...) {
  throw_own_error("Adam::step");
}

}  // namespace headway
