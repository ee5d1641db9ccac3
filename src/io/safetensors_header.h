// The header of a .safetensors file: JSON that names each tensor's type, shape and place.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "headway/tensor.h"
#include "io/file_context.h"

namespace headway::io {

using Metadata = std::map<std::string, std::string>;

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  Dims sizes;
  std::uint64_t begin = 0;  // [begin, end) in the bytes after the header, as claimed
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;
  Metadata metadata;
};

// The key that holds the metadata, and so cannot name a tensor.
inline constexpr std::string_view metadata_key = "__metadata__";

// Checks that the header is well formed; the caller checks what it claims about the data.
SafetensorsHeader parse_safetensors_header(std::string_view json, const FileContext& context);

// All texts must be UTF-8.
std::string write_safetensors_header(const SafetensorsHeader& header);

}  // namespace headway::io
