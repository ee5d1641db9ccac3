#include "support.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace headway::fuzz {

namespace fs = std::filesystem;

void fail(const char* what, std::string_view found) {
  std::fprintf(stderr, "%s: %.*s\n", what, static_cast<int>(found.size()), found.data());
  std::abort();
}

// Written from the tables of Unicode, not from the library's own function.
void require_printable(std::string_view text) {
  for (std::size_t at = 0; at < text.size(); ++at) {
    const auto byte = [&](std::size_t n) -> unsigned { return at + n < text.size() ? text[at + n] & 0xffu : 0u; };
    const auto continues = [&](std::size_t n) { return (byte(n) & 0xc0) == 0x80; };
    require(byte(0) >= 0x20 && byte(0) != 0x7f, "a control character", text);
    if (byte(0) < 0x80) {
      continue;
    }
    const std::size_t length = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
    for (std::size_t n = 1; n < length; ++n) {
      require(byte(0) >= 0xc2 && byte(0) <= 0xf4 && continues(n), "not UTF-8", text);
    }
    const std::string_view character = text.substr(at, length);
    require(!(character >= "\xc2\x80" && character < "\xc2\xa0"), "a C1 control character", text);
    for (const char* bad : {"\u061c", "\u200e", "\u200f", "\u2028", "\u2029", "\u202a", "\u202b", "\u202c", "\u202d",
                            "\u202e", "\u2066", "\u2067", "\u2068", "\u2069"}) {
      require(character != bad, "a character that reorders or ends the line", text);
    }
    at += length - 1;
  }
}

Folder::Folder() {
  const fs::path memory = "/dev/shm";
  std::error_code ignored;
  std::string pattern =
      (fs::is_directory(memory, ignored) ? memory : fs::temp_directory_path()) / "headway_fuzz_XXXXXX";
  require(::mkdtemp(pattern.data()) != nullptr, "no folder", pattern);
  path_ = pattern;
}

Folder::~Folder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void Folder::clean(std::span<const std::string> kept) const {
  for (const auto& entry : fs::directory_iterator(path_)) {
    if (std::find(kept.begin(), kept.end(), entry.path().filename()) == kept.end()) {
      fs::remove_all(entry.path());
    }
  }
}

InputAsFile::InputAsFile()
    : descriptor_(::memfd_create("input", MFD_CLOEXEC)), path_("/proc/self/fd/" + std::to_string(descriptor_)) {
  require(descriptor_ >= 0, "no file in memory");
}

const fs::path& InputAsFile::holding(const std::uint8_t* data, std::size_t size) const {
  require(::ftruncate(descriptor_, 0) == 0, "ftruncate");
  require(::pwrite(descriptor_, data, size, 0) == static_cast<ssize_t>(size), "pwrite");
  return path_;
}

bool same(ConstTensorView a, ConstTensorView b) {
  const auto bytes = static_cast<std::size_t>(a.elements()) * size_of(a.dtype());
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() &&
         (bytes == 0 || std::memcmp(a.data(), b.data(), bytes) == 0);
}

bool same(const NamedTensors& a, const NamedTensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.first == y.first && same(x.second, y.second); });
}

std::uint64_t bytes_of(const NamedTensors& tensors) {
  std::uint64_t bytes = 0;
  for (const auto& entry : tensors) {
    bytes += static_cast<std::uint64_t>(entry.second.elements()) * size_of(entry.second.dtype());
  }
  return bytes;
}

}  // namespace headway::fuzz
