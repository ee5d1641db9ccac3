// The operation and the file that it works on. Every error about a file is thrown from here, so that each text starts
// with both.
#pragma once

#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "core/text.h"
#include "headway/error.h"

namespace headway::io {

class FileContext {
 public:
  FileContext(const char* operation, const std::filesystem::path& path)
      : prefix_(text(operation, ": ", path.native(), ": ")) {}

  // The same file, at a named part of it.
  FileContext within(const std::string& part) const { return FileContext(prefix_ + part + ": "); }

  // fail("expected 4 bytes, found ", 3)
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    throw FileError(text(prefix_, parts...));
  }

  // The same with the errno that says what kind of failure it is: the FileError has a std::system_error nested in it.
  template <class... Parts>
  [[noreturn]] void fail_as(int error, const Parts&... parts) const {
    try {
      throw std::system_error(error, std::generic_category());
    } catch (const std::system_error&) {
      std::throw_with_nested(FileError(text(prefix_, parts...)));
    }
  }

  // For a system call that failed: `error` is its errno.
  [[noreturn]] void fail_system(const char* action, int error) const {
    fail_as(error, "cannot ", action, ": ", std::generic_category().message(error));
  }

 private:
  explicit FileContext(std::string prefix) : prefix_(std::move(prefix)) {}

  std::string prefix_;
};

}  // namespace headway::io
