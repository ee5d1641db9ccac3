#include "layer/parameters.h"

#include <algorithm>

#include "core/text.h"

namespace headway {
namespace {

// Joins views [in,out] or [out] if each begins where the one before it ends.
std::optional<ConstTensorView> side_by_side(const std::vector<ConstTensorView>& parts) {
  const ConstTensorView& first = parts.front();
  const int last = first.rank() - 1;
  Dims sizes = first.sizes();
  sizes[last] = 0;
  for (const ConstTensorView& part : parts) {
    const auto* expected =
        static_cast<const char*>(first.data()) + sizes[last] * static_cast<std::int64_t>(size_of(first.dtype()));
    const bool fits = part.rank() == first.rank() && part.strides() == first.strides() && part.stride(last) == 1 &&
                      (last == 0 || part.size(0) == first.size(0));
    if (!fits || part.data() != expected) {
      return std::nullopt;
    }
    sizes[last] += part.size(last);
  }
  return ConstTensorView(first.data(), first.dtype(), sizes, first.strides(), first.device());
}

}  // namespace

void Parameters::add(const std::string& name, Tensor tensor) {
  memory_.push_back(std::move(tensor));
  views_.emplace_back(name, memory_.back().view());
}

// There are few parameters in a fixed order: searching by name is fast enough.
std::optional<TensorView> Parameters::find(const std::string& name) const {
  const auto found = std::find_if(views_.begin(), views_.end(), [&](const auto& entry) { return entry.first == name; });
  return found == views_.end() ? std::nullopt : std::optional(found->second);
}

TensorView Parameters::required(const std::string& name) const {
  if (const auto found = find(name)) {
    return *found;
  }
  std::string names;
  for (const auto& entry : views_) {
    names += (names.empty() ? "" : ", ") + entry.first;
  }
  throw InvalidArgument(text("MultiHeadAttention::parameter: expected one of ", names, ", found ", name));
}

Projection Parameters::projection(char letter) const {
  Projection result{required(std::string("W_") + letter), {}};
  if (const auto bias = find(std::string("b_") + letter)) {
    result.bias = *bias;
  }
  return result;
}

std::optional<Projection> Parameters::joined(std::string_view letters) const {
  std::vector<ConstTensorView> weights, biases;
  for (const char letter : letters) {
    const auto [weight, bias] = projection(letter);
    weights.push_back(weight);
    if (bias) {
      biases.push_back(*bias);
    }
  }
  const auto weight = side_by_side(weights);
  const auto bias = biases.empty() ? std::nullopt : side_by_side(biases);
  if (!weight || (!biases.empty() && !bias)) {
    return std::nullopt;
  }
  return Projection{*weight, bias};
}

Parameters Parameters::copied_to(Device device, void* stream) const {
  Parameters result;
  result.views_ = views_;
  // On a device, neighbouring parameters of one kind and height share memory: W_q, W_k and W_v as columns, biases one
  // after the other.
  const auto together = [&](std::size_t a, std::size_t b) {
    const auto& [a_name, a_view] = views_[a];
    const auto& [b_name, b_view] = views_[b];
    return device != Device{} && a_name[0] == b_name[0] && b_name.back() != 'o' &&
           (a_view.rank() == 1 || a_view.size(0) == b_view.size(0));
  };
  for (std::size_t begin = 0, end = 0; begin < views_.size(); begin = end) {
    const TensorView& first = views_[begin].second;
    const int last = first.rank() - 1;
    Dims sizes = first.sizes();
    for (end = begin + 1; end < views_.size() && together(begin, end); ++end) {
      sizes[last] += views_[end].second.size(last);
    }
    result.memory_.push_back(Tensor::uninitialized(sizes, first.dtype(), device, stream));
    const TensorView all = result.memory_.back().view();
    std::int64_t at = 0;
    for (std::size_t n = begin; n < end; ++n) {
      const std::int64_t width = views_[n].second.size(last);
      result.views_[n].second = all.slice(last, at, at + width);
      copy(views_[n].second, result.views_[n].second, stream);
      at += width;
    }
  }
  return result;
}

}  // namespace headway
