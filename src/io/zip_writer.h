// Writes a .zip archive sequentially.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "io/bytes.h"
#include "io/output_file.h"

namespace headway::io {

class ZipWriter {
 public:
  explicit ZipWriter(OutputFile& file) : file_(file) {}

  // Adds a member of `bytes` bytes, which `fill` gives to the sink that it is called with. `name` is UTF-8.
  void add(const std::string& name, std::uint64_t bytes, bool compress,
           const std::function<void(const ByteSink&)>& fill);
  void finish();

 private:
  void write_end(std::uint64_t offset);

  OutputFile& file_;
  Bytes directory_;
  std::uint64_t entries_ = 0;
};

}  // namespace headway::io
