// Replaces npz.cpp in a build without zlib.
#include "headway/io.h"

namespace headway {

NamedTensors load_npz(const std::filesystem::path& /*path*/, const ReadLimits& /*limits*/) {
  throw Unsupported("load_npz: this build has no zlib");
}

void save_npz(const std::filesystem::path& /*path*/, const NamedViews& /*tensors*/, const WriteOptions& /*options*/) {
  throw Unsupported("save_npz: this build has no zlib");
}

}  // namespace headway
