// Tensor files: NumPy's .npy and .npz, and .safetensors. Every file is treated as hostile: what a header claims is
// checked against the file's real size before anything is allocated, and nothing in a file is ever executed (no
// pickle). Every write goes to a temporary file in the same folder, which is renamed when it is complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "headway/cxx20.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

// Tensors by name. If at() does not find a name, its error lists the names that exist.
class NamedTensors : public std::map<std::string, Tensor> {
 public:
  using std::map<std::string, Tensor>::map;
  Tensor& at(const std::string& name);
  const Tensor& at(const std::string& name) const;
  std::string names() const;  // "key, query", at most 20 of them, or "none"
};
using NamedViews = std::map<std::string, ConstTensorView>;

// A .safetensors file: tensors by name, and its free-form text metadata.
struct SafetensorsFile {
  NamedTensors tensors;
  std::map<std::string, std::string> metadata;
};

struct ReadLimits {
  std::uint64_t header_bytes = std::uint64_t{100} << 20;  // of .npy and .safetensors headers, and a .npz directory
  std::uint64_t tensor_bytes = std::uint64_t{1} << 40;    // of one tensor after decompression
};

struct WriteOptions {
  bool overwrite = false;  // an existing file is an error otherwise
  bool compress = false;   // .npz only: deflate instead of store
};

Tensor load_npy(const std::filesystem::path& path, const ReadLimits& limits = {});
NamedTensors load_npz(const std::filesystem::path& path, const ReadLimits& limits = {});
SafetensorsFile load_safetensors(const std::filesystem::path& path, const ReadLimits& limits = {});

// bf16 has no .npy type of its own: .npy and .npz refuse it, .safetensors takes every type.
void save_npy(const std::filesystem::path& path, ConstTensorView tensor, const WriteOptions& options = {});
void save_npz(const std::filesystem::path& path, const NamedViews& tensors, const WriteOptions& options = {});
void save_safetensors(const std::filesystem::path& path, const NamedViews& tensors,
                      const std::map<std::string, std::string>& metadata = {}, const WriteOptions& options = {});

// ---- Parts of .npy files, for arrays that are too large for one process ----

struct NpyShape {
  DType dtype = DType::f32;
  Dims sizes;
};

// The type and sizes of a file's array; only its header is read.
NpyShape npy_shape(const std::filesystem::path& path, const ReadLimits& limits = {});
// Elements [begin, end) along an axis; nothing else is read.
Tensor load_npy_slice(const std::filesystem::path& path, int axis, std::int64_t begin, std::int64_t end,
                      const ReadLimits& limits = {});

// For a file that several processes write. One process begins it: it creates a temporary file in the same folder, with
// a header and space for all elements, and sends its name to the others. Each process writes its slices into it; then
// one commits it under its real name. If something fails, the program must remove the temporary file.
std::filesystem::path begin_npy(const std::filesystem::path& path, const NpyShape& shape,
                                const WriteOptions& options = {});
void write_npy_slice(const std::filesystem::path& temporary, int axis, std::int64_t begin, ConstTensorView slice);
void commit_npy(const std::filesystem::path& temporary, const std::filesystem::path& path,
                const WriteOptions& options = {});

}  // namespace headway
#pragma GCC visibility pop
