// Reads bytes of a file of known size, never past its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "io/file_context.h"
#include "io/file_descriptor.h"

namespace headway::io {

// Bytes that are read once, sequentially. remaining() is the number claimed to follow; for a compressed source the
// claim may be false, which read() then reports.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual void read(std::span<std::byte> to) = 0;  // all of `to`, or a FileError
  virtual std::uint64_t remaining() const = 0;
};

class InputFile {
 public:
  // A FileError unless `path` is a regular file that may be read.
  InputFile(const char* operation, const std::filesystem::path& path);

  std::uint64_t size() const { return size_; }
  const FileContext& context() const { return context_; }
  void read_at(std::uint64_t offset, std::span<std::byte> to) const;

 private:
  FileContext context_;
  FileDescriptor descriptor_;
  std::uint64_t size_ = 0;
};

// A part of a file; the caller has checked that it lies inside.
class FileRange final : public ByteSource {
 public:
  FileRange(const InputFile& file, std::uint64_t offset, std::uint64_t bytes)
      : file_(file), offset_(offset), remaining_(bytes) {}

  void read(std::span<std::byte> to) override;
  std::uint64_t remaining() const override { return remaining_; }

 private:
  const InputFile& file_;
  std::uint64_t offset_;
  std::uint64_t remaining_;
};

}  // namespace headway::io
