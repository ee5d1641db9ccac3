// The text metadata of a .safetensors file, read as hostile.
#pragma once

#include <charconv>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/text.h"
#include "headway/error.h"
#include "headway/io.h"

namespace headway {

using Metadata = std::map<std::string, std::string>;

// Reads metadata; every error begins with the operation and the file.
class MetadataReader {
 public:
  MetadataReader(const char* operation, const std::filesystem::path& path, const Metadata& metadata)
      : operation_(operation), path_(path), metadata_(metadata) {}

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    throw FileError(text(operation_, ": ", path_.string(), ": ", parts...));
  }

  const std::string& value(const std::string& key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) {
      refuse("expected the metadata to say ", key, ", found nothing");
    }
    return found->second;
  }

  bool has(const std::string& key) const { return metadata_.count(key) != 0; }

  // An integer, or a float as std::to_chars writes it.
  template <class Number>
  Number number(const std::string& key) const {
    const std::string& digits = value(key);
    Number number{};
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc{} || end != digits.data() + digits.size()) {
      refuse("expected ", key, std::is_integral_v<Number> ? " to be an integer" : " to be a number", ", found \"",
             shortened(digits), "\"");
    }
    return number;
  }

  // The one of `choices` whose name the metadata gives.
  template <class Choice>
  Choice choice(const std::string& key, std::initializer_list<Choice> choices) const {
    std::string names;
    for (const Choice candidate : choices) {
      if (value(key) == name(candidate)) {
        return candidate;
      }
      names += text(names.empty() ? "" : ", ", name(candidate));
    }
    refuse("expected ", key, " to be one of ", names, ", found \"", shortened(value(key)), "\"");
  }

  // Text from the file in an error message: shortened, and in printable characters.
  static std::string shortened(std::string_view foreign) {
    constexpr std::size_t longest = 60;
    std::string result(foreign.substr(0, longest));
    for (char& c : result) {
      c = c >= ' ' && c <= '~' ? c : '?';
    }
    return foreign.size() > longest ? result + "..." : result;
  }

 private:
  const char* operation_;
  const std::filesystem::path& path_;
  const Metadata& metadata_;
};

// Takes one tensor out of a file's; it must have this type and shape.
inline Tensor take_tensor(const MetadataReader& reader, NamedTensors& tensors, const std::string& name,
                          const Dims& sizes, DType dtype) {
  auto entry = tensors.extract(name);
  if (!entry) {
    reader.refuse("expected a tensor ", name, ", found none");
  }
  Tensor& tensor = entry.mapped();
  if (tensor.dtype() != dtype) {
    reader.refuse(name, " has type ", tensor.dtype(), ", expected ", dtype);
  }
  if (tensor.sizes() != sizes) {
    reader.refuse(name, " has shape ", tensor.sizes(), ", expected ", sizes);
  }
  return std::move(tensor);
}

enum class YesNo : bool { no, yes };
inline const char* name(YesNo value) { return value == YesNo::yes ? "true" : "false"; }

}  // namespace headway
