// Tensors by name: an error that says which names there are.
#include <utility>

#include "core/text.h"
#include "headway/io.h"

namespace headway {

std::string NamedTensors::names() const {
  constexpr int most = 20;
  std::string names;
  int listed = 0;
  for (const auto& entry : *this) {
    if (listed++ == most) {
      return names + ", ...";
    }
    names += (names.empty() ? "" : ", ") + entry.first;
  }
  return names.empty() ? "none" : names;
}

const Tensor& NamedTensors::at(const std::string& name) const {
  const auto found = find(name);
  if (found == end()) {
    throw InvalidArgument(text("tensors: there is none named '", name, "'; found ", names()));
  }
  return found->second;
}

Tensor& NamedTensors::at(const std::string& name) { return const_cast<Tensor&>(std::as_const(*this).at(name)); }

}  // namespace headway
