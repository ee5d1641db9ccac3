// Printing dims, devices and tensors.
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <ostream>
#include <sstream>
#include <vector>

#include "core/elements.h"
#include "headway/tensor.h"

namespace headway {
namespace {

constexpr std::int64_t edge_items = 3;         // shown at each end of an axis that is shortened
constexpr std::int64_t shown_elements = 1000;  // a tensor with more is shortened

std::string format_element(ConstTensorView view, std::int64_t offset) {
  std::ostringstream stream;
  if (view.dtype() == DType::b8) {
    stream << (load_bool(view, offset) ? "true" : "false");
  } else if (is_integer(view.dtype())) {
    stream << load_integer(view, offset);
  } else {
    stream << std::setprecision(view.dtype() == DType::f64 ? 8 : 6) << load_number(view, offset);
  }
  return std::move(stream).str();
}

// The indices of one axis that are printed; -1 stands for the dots.
std::vector<std::int64_t> shown_indices(std::int64_t size, bool shortened) {
  std::vector<std::int64_t> indices;
  for (std::int64_t i = 0; i < size; ++i) {
    if (shortened && size > 2 * edge_items && i == edge_items) {
      indices.push_back(-1);
      i = size - edge_items;
    }
    indices.push_back(i);
  }
  return indices;
}

template <class Visit>
void for_each_shown(ConstTensorView view, int axis, std::int64_t offset, bool shortened, const Visit& visit) {
  if (axis == view.rank()) {
    visit(offset);
    return;
  }
  for (const std::int64_t i : shown_indices(view.size(axis), shortened)) {
    if (i >= 0) {
      for_each_shown(view, axis + 1, offset + i * view.stride(axis), shortened, visit);
    }
  }
}

struct Printer {
  std::ostream& stream;
  ConstTensorView view;
  bool shortened;
  std::size_t width = 0;

  void print(int axis, std::int64_t offset) {
    if (axis == view.rank()) {
      stream << std::setw(static_cast<int>(width)) << format_element(view, offset);
      return;
    }
    const bool innermost = axis + 1 == view.rank();
    const std::string separator =
        innermost ? " " : std::string(static_cast<std::size_t>(std::max(1, view.rank() - axis - 1)), '\n');
    stream << '[';
    bool first = true;
    for (const std::int64_t i : shown_indices(view.size(axis), shortened)) {
      if (!first) {
        stream << separator;
        if (!innermost) {
          stream << std::string(static_cast<std::size_t>(axis) + 1, ' ');
        }
      }
      first = false;
      if (i < 0) {
        stream << "...";
      } else {
        print(axis + 1, offset + i * view.stride(axis));
      }
    }
    stream << ']';
  }
};

}  // namespace

std::ostream& operator<<(std::ostream& stream, const Dims& dims) {
  stream << '(';
  for (int axis = 0; axis < dims.size(); ++axis) {
    stream << (axis == 0 ? "" : ", ") << dims[axis];
  }
  return stream << (dims.size() == 1 ? ",)" : ")");
}

std::ostream& operator<<(std::ostream& stream, Device device) {
  if (device.type == DeviceType::cpu) {
    return stream << "cpu";
  }
  return stream << "cuda:" << device.index;
}

std::ostream& operator<<(std::ostream& stream, const ConstTensorView& view) {
  if (view.device() != Device{}) {
    return stream << "tensor " << view.sizes() << ' ' << view.dtype() << " on " << view.device();
  }
  if (view.elements() == 0) {
    return stream << "[] " << view.sizes();
  }
  Printer printer{stream, view, view.elements() > shown_elements};
  for_each_shown(view, 0, 0, printer.shortened, [&](std::int64_t offset) {
    printer.width = std::max(printer.width, format_element(view, offset).size());
  });
  printer.print(0, 0);
  return stream;
}

}  // namespace headway
