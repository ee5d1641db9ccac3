// Converts between tensors and the bytes of their elements in C order, which all three formats store.
#include "io/tensor_bytes.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/elements.h"
#include "io/text_checks.h"

namespace headway::io {
namespace {

// The size of one write: large enough for the disk, small compared with a tensor for which memory is short.
constexpr std::size_t chunk_bytes = std::size_t{1} << 20;

std::span<const std::byte> contiguous_bytes(ConstTensorView view) {
  return {static_cast<const std::byte*>(view.data()),
          static_cast<std::size_t>(view.elements()) * size_of(view.dtype())};
}

// Advances `index` to the next element in C order, and `offset` with it. The offset never leaves the view, not even
// temporarily, so strides of any size are safe.
void advance(ConstTensorView view, Dims& index, std::int64_t& offset) {
  for (int axis = view.rank() - 1; axis >= 0; --axis) {
    if (++index[axis] < view.size(axis)) {
      offset += view.stride(axis);
      return;
    }
    index[axis] = 0;
    offset -= (view.size(axis) - 1) * view.stride(axis);
  }
}

template <class T>
void write_gathered(const ByteSink& sink, ConstTensorView view) {
  const auto* elements = static_cast<const T*>(view.data());
  auto remaining = static_cast<std::size_t>(view.elements());
  std::vector<T> chunk(std::min(remaining, chunk_bytes / sizeof(T)));
  Dims index = view.sizes();
  std::fill_n(&index[0], index.size(), 0);
  std::int64_t offset = 0;
  while (remaining > 0) {
    const auto filled = std::span(chunk).first(std::min(remaining, chunk.size()));
    for (T& element : filled) {
      element = elements[offset];
      advance(view, index, offset);
    }
    sink(std::as_bytes(filled));
    remaining -= filled.size();
  }
}

}  // namespace

const TypeName* find_type(std::span<const TypeName> types, std::string_view name) {
  const auto found = std::find_if(types.begin(), types.end(), [&](const TypeName& type) { return type.name == name; });
  return found == types.end() ? nullptr : &*found;
}

const TypeName* find_type(std::span<const TypeName> types, DType dtype) {
  const auto found =
      std::find_if(types.begin(), types.end(), [&](const TypeName& type) { return type.dtype == dtype; });
  return found == types.end() ? nullptr : &*found;
}

std::string listed(std::span<const TypeName> types) {
  std::string result;
  for (const TypeName& type : types) {
    result += result.empty() ? "" : ", ";
    result += type.name;
  }
  return result;
}

void append_size(Dims& sizes, std::uint64_t size, const FileContext& context) {
  if (sizes.size() == Dims::max_rank) {
    context.fail("expected at most ", Dims::max_rank, " dimensions, found more");
  }
  if (size > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    context.fail("expected sizes below 2^63, found ", size);
  }
  sizes.push_back(static_cast<std::int64_t>(size));
}

std::uint64_t checked_bytes(const Dims& sizes, DType dtype, const ReadLimits& limits, const FileContext& context) {
  std::uint64_t bytes = std::numeric_limits<std::uint64_t>::max();
  try {
    bytes = static_cast<std::uint64_t>(checked_elements(sizes, dtype)) * size_of(dtype);
  } catch (const InvalidArgument&) {
    context.fail("expected a tensor of less than 2^63 bytes, found ", dtype, " of shape ", sizes);
  }
  if (bytes > limits.tensor_bytes) {
    context.fail("expected at most ", limits.tensor_bytes, " bytes for one tensor, found ", bytes, " (", dtype,
                 " of shape ", sizes, ")");
  }
  return bytes;
}

Tensor read_elements(ByteSource& source, const Dims& sizes, DType dtype) {
  Tensor result = Tensor::uninitialized(sizes, dtype);
  const auto count = static_cast<std::size_t>(result.elements());
  source.read({static_cast<std::byte*>(result.data()), count * size_of(dtype)});
  return result;
}

std::string for_tensor(std::string_view name) { return name.empty() ? "" : " for " + shown(name); }

void require_host(const char* operation, std::string_view name, ConstTensorView view) {
  if (view.device().type != DeviceType::cpu) {
    throw Unsupported(text(operation, ": expected host memory", for_tensor(name), ", found ", view.device()));
  }
}

void write_elements(const ByteSink& sink, ConstTensorView view) {
  if (view.elements() == 0) {
    return;
  }
  if (!view.is_contiguous()) {
    with_element_type(view.dtype(), [&](auto type) { write_gathered<decltype(type)>(sink, view); });
    return;
  }
  for (auto bytes = contiguous_bytes(view); !bytes.empty();) {
    const auto chunk = bytes.first(std::min(bytes.size(), chunk_bytes));
    sink(chunk);
    bytes = bytes.subspan(chunk.size());
  }
}

}  // namespace headway::io
