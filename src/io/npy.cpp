// load_npy and save_npy.
#include "headway/io.h"
#include "io/npy_format.h"

namespace headway {

Tensor load_npy(const std::filesystem::path& path, const ReadLimits& limits) {
  const io::InputFile file("load_npy", path);
  io::FileRange source(file, 0, file.size());
  return io::read_npy(source, file.context(), limits);
}

void save_npy(const std::filesystem::path& path, ConstTensorView tensor, const WriteOptions& options) {
  io::require_npy("save_npy", "", tensor);
  io::OutputFile file("save_npy", path, options.overwrite);
  io::write_npy(file.sink(), tensor);
  file.commit();
}

}  // namespace headway
