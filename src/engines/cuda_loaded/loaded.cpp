// In libheadway: finds the library of the CUDA engine beside it, and calls it by its table.
#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

#include "core/absent_engine.h"
#include "core/text.h"
#include "engines/cuda_loaded/table.h"
#include "headway/version.h"

#define HEADWAY_QUOTED_AS_IT_IS(name) #name
#define HEADWAY_QUOTED(name) HEADWAY_QUOTED_AS_IT_IS(name)

namespace headway {
namespace {

// The folder of the library, or of the program, that this code is in, with its last slash.
std::string own_folder() {
  Dl_info library{};
  if (dladdr(reinterpret_cast<void*>(&own_folder), &library) == 0 || library.dli_fname == nullptr) {
    return {};
  }
  const std::string_view file = library.dli_fname;
  return std::string(file.substr(0, file.rfind('/') + 1));
}

// How many bytes a library must have for its segments: dlopen maps them without looking at the size of the file, and a
// program that touches what is missing ends with SIGBUS. 0 of what is no library: dlopen says that itself.
std::uint64_t bytes_of_segments(std::istream& file) {
  const auto read = [&](std::uint64_t offset, auto& into) {
    file.seekg(static_cast<std::streamoff>(offset));
    return bool(file.read(reinterpret_cast<char*>(&into), sizeof into));
  };
  Elf64_Ehdr header{};
  if (!read(0, header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_phentsize != sizeof(Elf64_Phdr)) {
    return 0;
  }
  std::uint64_t bytes = header.e_phoff + std::uint64_t{header.e_phnum} * sizeof(Elf64_Phdr);
  Elf64_Phdr segment{};
  for (std::uint64_t n = 0; n < header.e_phnum && read(header.e_phoff + n * sizeof segment, segment); ++n) {
    if (segment.p_type == PT_LOAD) {
      bytes = std::max(bytes, segment.p_offset + segment.p_filesz);
    }
  }
  return bytes;
}

struct Loaded {
  const cuda::Table* table = nullptr;
  std::string reason;  // why there is no table
};

// Never closed: tensors and streams may outlive every static object here.
Loaded load() {
  const std::string file = own_folder() + "libheadway_cuda.so";
  std::ifstream stream(file, std::ios::binary | std::ios::ate);
  if (stream) {
    const auto bytes = static_cast<std::uint64_t>(stream.tellg());
    if (const std::uint64_t needed = bytes_of_segments(stream); bytes < needed) {
      return {nullptr, text("its library is incomplete: ", file, " has ", bytes, " of at least ", needed, " bytes")};
    }
  }
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return {nullptr, text("its library could not be loaded: ", dlerror())};
  }
  const auto get_table =
      reinterpret_cast<decltype(&HEADWAY_CUDA_TABLE)>(dlsym(library, HEADWAY_QUOTED(HEADWAY_CUDA_TABLE)));
  if (get_table == nullptr) {
    return {nullptr, text(file, " is not the CUDA engine that was built with this libheadway ", HEADWAY_VERSION)};
  }
  return {get_table(), {}};
}

const Loaded& loaded() {
  static const Loaded result = load();
  return result;
}

// Never closed either: the engine is about to use it.
bool has_driver() { return dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr; }

const cuda::Table& table() {
  if (loaded().table == nullptr) {
    throw Unsupported(text("the CUDA engine: ", loaded().reason));
  }
  return *loaded().table;
}

}  // namespace

const EngineBase& cuda_engine() {
  static const bool driver = has_driver();
  if (driver && loaded().table != nullptr) {
    return loaded().table->engine();
  }
  static const AbsentEngine absent(Engine::cuda,
                                   driver ? loaded().reason.c_str() : "there is no CUDA device, or no driver for one");
  return absent;
}

void* take_device_memory(std::size_t bytes, Device device, void* stream) {
  return table().take_memory(bytes, device, stream);
}

void give_back_device_memory(void* memory, Device device, void* stream) noexcept {
  if (loaded().table != nullptr) {
    loaded().table->give_back_memory(memory, device, stream);
  }
}

void clear_device_memory(void* memory, std::size_t bytes, Device device, void* stream) {
  table().clear_memory(memory, bytes, device, stream);
}

void copy_with_device(const ConstTensorView& from, const TensorView& to, void* stream) {
  table().copy(from, to, stream);
}

void analyze_on_device(const Problem& problem, const AnalysisRequest& request, const CellTaker& taker,
                       Analysis& result) {
  table().analyze(problem, request, taker, result);
}

void weights_on_device(const Problem& problem, const Rectangle& rectangle, const std::optional<ConstTensorView>& lse,
                       Tensor& weights) {
  table().weights(problem, rectangle, lse, weights);
}

void map_on_device(const Problem& problem, std::int64_t batch, std::int64_t head, const Rectangle& rectangle,
                   std::int64_t row_cell, std::int64_t key_cell, const ConstTensorView& lse, TileMap& map) {
  table().map(problem, batch, head, rectangle, row_cell, key_cell, lse, map);
}

void mean_weights_on_device(const Problem& problem, const ConstTensorView& lse, const TensorView& mean) {
  table().mean_weights(problem, lse, mean);
}

void rope_on_device(const char* operation, const ConstTensorView& x, const ConstTensorView& positions,
                    const TensorView& out, const DeviceRotation& rotation, void* stream) {
  table().rope(operation, x, positions, out, rotation, stream);
}

void append_on_device(const char* operation, const DeviceAppend& append, void* stream) {
  table().append(operation, append, stream);
}

namespace cuda {

void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y,
            const LinearCall& call) {
  table().linear_map(x, weight, bias, y, call);
}

void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight, const LinearGradients& gradients,
                     const LinearCall& call) {
  table().linear_map_backward(dy, x, weight, gradients, call);
}

}  // namespace cuda
}  // namespace headway
