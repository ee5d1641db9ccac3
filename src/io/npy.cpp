// load_npy and save_npy.
#include "core/out_of_memory.h"
#include "headway/io.h"
#include "io/npy_format.h"

namespace headway {

Tensor load_npy(const std::filesystem::path& path, const ReadLimits& limits) try {
  const io::InputFile file("load_npy", path);
  io::FileRange source(file, 0, file.size());
  return io::read_npy(source, file.context(), limits);
} catch (...) {
  throw_own_error("load_npy");
}

void save_npy(const std::filesystem::path& path, ConstTensorView tensor, const WriteOptions& options) try {
  io::refuse_other_format("save_npy", path, ".npy");
  io::require_npy("save_npy", "", tensor);
  io::OutputFile file("save_npy", path, options.overwrite);
  io::write_npy(file.sink(), tensor);
  file.commit();
} catch (...) {
  throw_own_error("save_npy");
}

}  // namespace headway
