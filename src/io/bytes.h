// Little-endian integers in bytes, and reading a sequence of them without passing its end.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "io/file_context.h"

namespace headway::io {

// Elements and integers are little-endian in all three formats, and are copied byte for byte.
static_assert(std::endian::native == std::endian::little, "the io room is written for little-endian machines");

using Bytes = std::vector<std::byte>;

template <class Integer>
Integer load_integer(std::span<const std::byte> bytes) {
  Integer value;
  std::memcpy(&value, bytes.first(sizeof value).data(), sizeof value);
  return value;
}

void append_bytes(Bytes& bytes, std::span<const std::byte> more);

template <class Integer>
void append_integer(Bytes& bytes, Integer value) {
  append_bytes(bytes, std::as_bytes(std::span(&value, 1)));
}

inline std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

inline std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Takes fields off the front of bytes from a file; an incomplete field is a FileError.
class FieldReader {
 public:
  FieldReader(std::span<const std::byte> bytes, const FileContext& context) : bytes_(bytes), context_(context) {}

  bool empty() const { return bytes_.empty(); }

  std::span<const std::byte> take(std::size_t count) {
    if (count > bytes_.size()) {
      context_.fail("expected ", count, " more bytes, found ", bytes_.size());
    }
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }

  template <class Integer>
  Integer take() {
    return load_integer<Integer>(take(sizeof(Integer)));
  }

 private:
  std::span<const std::byte> bytes_;
  const FileContext& context_;
};

}  // namespace headway::io
