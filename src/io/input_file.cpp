// Reads bytes of a file of known size, never past its end.
#include "io/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

namespace headway::io {

InputFile::InputFile(const char* operation, const std::filesystem::path& path) : context_(operation, path) {
  // Non-blocking: opening a FIFO would otherwise wait for a writer.
  descriptor_ = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!descriptor_.is_open()) {
    context_.fail_system("open", errno);
  }
  struct stat status {};
  if (::fstat(descriptor_.number(), &status) != 0) {
    context_.fail_system("read", errno);
  }
  if (S_ISDIR(status.st_mode)) {
    context_.fail_system("read", EISDIR);
  }
  if (!S_ISREG(status.st_mode)) {
    context_.fail("expected a regular file, found ", S_ISFIFO(status.st_mode) ? "a FIFO" : "a device or socket");
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

void InputFile::read_at(std::uint64_t offset, std::span<std::byte> to) const {
  constexpr std::size_t most_at_once = std::size_t{1} << 30;  // Linux reads a little less than 2^31 bytes in one call
  while (!to.empty()) {
    const ssize_t count =
        ::pread(descriptor_.number(), to.data(), std::min(to.size(), most_at_once), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      context_.fail_system("read", errno);
    }
    if (count == 0) {
      context_.fail("expected ", to.size(), " bytes at offset ", offset, ", found the end of the file");
    }
    offset += static_cast<std::uint64_t>(count);
    to = to.subspan(static_cast<std::size_t>(count));
  }
}

void FileRange::read(std::span<std::byte> to) {
  if (to.size() > remaining_) {
    file_.context().fail("expected ", to.size(), " bytes at offset ", offset_, ", found ", remaining_);
  }
  file_.read_at(offset_, to);
  offset_ += to.size();
  remaining_ -= to.size();
}

}  // namespace headway::io
