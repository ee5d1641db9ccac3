// The tensors that a command reads, owned together: a file that is named several times is read once.
#pragma once

#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "headway/io.h"

namespace headway::cli {

enum class Format { npy, npz, safetensors };

// The format that a path's extension names.
std::optional<Format> format_of(const std::filesystem::path& path);

// q.npy, qkv.npz:q or qkv.safetensors:q. Without ":q" a container must hold one tensor only.
struct TensorName {
  std::filesystem::path path;
  Format format;
  std::optional<std::string> tensor;
};

// Empty if there is no such extension: the text is not a file's name.
std::optional<TensorName> parse_tensor_name(const std::string& name);

// Every tensor of a file, whatever tensor the name asks for; the one of a .npy file has an empty name.
NamedTensors read(const TensorName& name);

class TensorInputs {
 public:
  ConstTensorView load(const std::string& name);

  // A file, or numbers with commas: [n] i64, and [n] f64.
  ConstTensorView integers(const std::string& numbers_or_name);
  ConstTensorView floats(const std::string& numbers_or_name);

 private:
  const NamedTensors& contents(const TensorName& name);
  ConstTensorView keep(Tensor tensor);

  std::map<std::filesystem::path, NamedTensors> files_;
  std::deque<Tensor> given_inline_;
};

}  // namespace headway::cli
