// The tensors that a command reads.
#include "tensor_inputs.h"

#include <algorithm>
#include <array>
#include <utility>

#include "arguments.h"
#include "text.h"

namespace headway::cli {
namespace {

struct Extension {
  std::string_view spelling;
  Format format;
};
constexpr std::array<Extension, 3> extensions = {
    {{".npy", Format::npy}, {".npz", Format::npz}, {".safetensors", Format::safetensors}}};

}  // namespace

NamedTensors read(const TensorName& name) {
  switch (name.format) {
    case Format::npz: return load_npz(name.path);
    case Format::safetensors: return load_safetensors(name.path).tensors;
    case Format::npy: break;
  }
  NamedTensors tensors;
  tensors.emplace("", load_npy(name.path));
  return tensors;
}

std::optional<Format> format_of(const std::filesystem::path& path) {
  for (const auto& [spelling, format] : extensions) {
    if (path.native().ends_with(spelling)) {
      return format;
    }
  }
  return std::nullopt;
}

std::optional<TensorName> parse_tensor_name(const std::string& name) {
  for (const auto& [spelling, format] : extensions) {
    const std::string with_colon = text(spelling, ':');
    const std::size_t found = name.find(with_colon);
    if (format != Format::npy && found != std::string::npos) {
      return TensorName{name.substr(0, found + spelling.size()), format, name.substr(found + with_colon.size())};
    }
  }
  const std::optional<Format> format = format_of(name);
  return format ? std::optional(TensorName{name, *format, std::nullopt}) : std::nullopt;
}

ConstTensorView TensorInputs::load(const std::string& name) {
  const std::optional<TensorName> parsed = parse_tensor_name(name);
  if (!parsed) {
    throw UsageError(
        text("expected file.npy, file.npz:name or file.safetensors:name, found ", name.empty() ? "nothing" : name));
  }
  const NamedTensors& tensors = contents(*parsed);
  if (!parsed->tensor) {
    if (tensors.size() != 1) {
      throw UsageError(text(name, ": expected the name of a tensor after a colon; it has ", tensors.names()));
    }
    return tensors.begin()->second;
  }
  const auto found = tensors.find(*parsed->tensor);
  if (found == tensors.end()) {
    throw Failure(
        text(parsed->path.native(), ": expected a tensor named ", *parsed->tensor, "; it has ", tensors.names()));
  }
  return found->second;
}

const NamedTensors& TensorInputs::contents(const TensorName& name) {
  const auto found = files_.find(name.path);
  return found != files_.end() ? found->second : files_.emplace(name.path, read(name)).first->second;
}

ConstTensorView TensorInputs::keep(Tensor tensor) { return given_inline_.emplace_back(std::move(tensor)).view(); }

ConstTensorView TensorInputs::integers(const std::string& numbers_or_name) {
  if (parse_tensor_name(numbers_or_name)) {
    return load(numbers_or_name);
  }
  const auto numbers = parse_numbers<std::int64_t>(numbers_or_name);
  return keep(Tensor::of({static_cast<std::int64_t>(numbers.size())}, numbers));
}

ConstTensorView TensorInputs::floats(const std::string& numbers_or_name) {
  if (parse_tensor_name(numbers_or_name)) {
    return load(numbers_or_name);
  }
  const auto numbers = parse_numbers<double>(numbers_or_name);
  return keep(Tensor::of({static_cast<std::int64_t>(numbers.size())}, numbers));
}

}  // namespace headway::cli
