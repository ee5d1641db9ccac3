// The directory of a .zip archive, checked against the file before any member is read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "headway/io.h"
#include "io/input_file.h"

namespace headway::io {

struct ZipEntry {
  std::string name;
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint32_t checksum = 0;
  std::uint64_t packed_bytes = 0;  // in the archive
  std::uint64_t bytes = 0;         // when unpacked, as claimed
  std::uint64_t header_offset = 0;
  std::uint64_t data_offset = 0;
};

// For errors about one member.
FileContext member_context(const InputFile& file, const ZipEntry& entry);

// Every entry must lie inside the file, and no two may share bytes: otherwise a small archive could unpack to far more
// than its own size allows.
std::vector<ZipEntry> read_zip_directory(const InputFile& file, const ReadLimits& limits);

}  // namespace headway::io
