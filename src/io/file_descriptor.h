// Owns a file descriptor.
#pragma once

#include <unistd.h>

#include <utility>

namespace headway::io {

class FileDescriptor {
 public:
  explicit FileDescriptor(int number = -1) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileDescriptor() { close(); }

  bool is_open() const { return number_ >= 0; }
  int number() const { return number_; }

  // Returns what ::close returned: a file system may report a failed write only here.
  int close() { return is_open() ? ::close(std::exchange(number_, -1)) : 0; }

 private:
  int number_;
};

}  // namespace headway::io
