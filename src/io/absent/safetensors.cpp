// Replaces safetensors.cpp in a build without nlohmann-json.
#include "headway/io.h"

namespace headway {

SafetensorsFile load_safetensors(const std::filesystem::path& /*path*/, const ReadLimits& /*limits*/) {
  throw Unsupported("load_safetensors: this build has no nlohmann-json");
}

void save_safetensors(const std::filesystem::path& /*path*/, const NamedViews& /*tensors*/,
                      const std::map<std::string, std::string>& /*metadata*/, const WriteOptions& /*options*/) {
  throw Unsupported("save_safetensors: this build has no nlohmann-json");
}

}  // namespace headway
