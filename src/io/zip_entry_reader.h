// The unpacked bytes of one member of a .zip archive.
#pragma once

#include <zlib.h>

#include "io/bytes.h"
#include "io/file_context.h"
#include "io/input_file.h"
#include "io/zip_directory.h"

namespace headway::io {

class ZipEntryReader final : public ByteSource {
 public:
  // A FileError when the entry claims more bytes than its packed bytes could ever unpack to.
  ZipEntryReader(const InputFile& file, const ZipEntry& entry, const FileContext& context);
  ~ZipEntryReader() override;
  ZipEntryReader(const ZipEntryReader&) = delete;
  ZipEntryReader& operator=(const ZipEntryReader&) = delete;

  void read(std::span<std::byte> to) override;
  std::uint64_t remaining() const override { return remaining_; }

  // After everything was read: a FileError unless the packed bytes end here too and the checksum is right.
  void finish();

 private:
  void inflate_into(std::span<std::byte> to);
  void refill();
  std::size_t inflate_step(std::span<std::byte> to);
  void refuse_rest();

  const ZipEntry& entry_;
  const FileContext& context_;
  FileRange packed_;
  std::uint64_t remaining_;
  uLong checksum_ = 0;
  Bytes buffer_;
  z_stream stream_{};
  bool ended_ = false;
};

}  // namespace headway::io
