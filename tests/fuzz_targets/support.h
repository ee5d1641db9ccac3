// What the fuzz targets share: taking values off the input, a file and a folder in memory, and what must hold of texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "headway/io.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace headway::fuzz {

// Ends the process with `what`, which the fuzzer takes for a crash and keeps the input.
[[noreturn]] void fail(const char* what, std::string_view found = {});

inline void require(bool holds, const char* what, std::string_view found = {}) {
  if (!holds) {
    fail(what, found);
  }
}

// Valid UTF-8 on one line, without characters that a terminal acts on.
void require_printable(std::string_view text);

// Takes values off the front of the input; zeros when it is used up.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }

  template <class T>
  T take() {
    T value{};
    const std::string_view bytes = take_bytes(sizeof value);
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }

  std::size_t below(std::size_t bound) { return take<std::uint8_t>() % bound; }
  bool coin() { return below(2) != 0; }
  std::string text() { return std::string(take_bytes(below(24))); }

  std::string_view take_bytes(std::size_t count) {
    const std::string_view bytes = rest_.substr(0, count);
    rest_.remove_prefix(bytes.size());
    return bytes;
  }

 private:
  std::string_view rest_;
};

// A folder in memory where there is such a place; it goes with the process.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }
  // Removes every file but those named in `kept`.
  void clean(std::span<const std::string> kept) const;

 private:
  std::filesystem::path path_;
};

// The input as a file that can be opened by its path.
class InputAsFile {
 public:
  InputAsFile();
  const std::filesystem::path& holding(const std::uint8_t* data, std::size_t size) const;

 private:
  int descriptor_;
  std::filesystem::path path_;
};

bool same(ConstTensorView a, ConstTensorView b);  // type, sizes and bits
bool same(const NamedTensors& a, const NamedTensors& b);
std::uint64_t bytes_of(const NamedTensors& tensors);

}  // namespace headway::fuzz
