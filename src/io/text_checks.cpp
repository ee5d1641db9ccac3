// Names that come from files or go into them.
#include "io/text_checks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace headway::io {
namespace {

// How many bytes a UTF-8 sequence with this first byte has; 0 when no sequence starts so.
std::size_t sequence_length(unsigned char first) {
  if (first < 0x80) {
    return 1;
  }
  if (first >= 0xc2 && first <= 0xdf) {
    return 2;
  }
  if (first >= 0xe0 && first <= 0xef) {
    return 3;
  }
  return first >= 0xf0 && first <= 0xf4 ? 4 : 0;
}

// Longer than needed, a surrogate, or beyond Unicode: all of these show in the second byte.
bool is_second_byte_allowed(unsigned char first, unsigned char second) {
  switch (first) {
    case 0xe0: return second >= 0xa0;
    case 0xed: return second < 0xa0;
    case 0xf0: return second >= 0x90;
    case 0xf4: return second < 0x90;
    default: return true;
  }
}

}  // namespace

std::string shown(std::string_view untrusted) {
  constexpr std::size_t longest = 80;
  constexpr char digits[] = "0123456789abcdef";
  std::string result = "\"";
  for (const char character : untrusted.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(character);
    if (byte < 0x20 || byte > 0x7e) {
      result += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
    } else {
      result += character;
    }
  }
  return result + (untrusted.size() > longest ? "\"..." : "\"");
}

bool is_utf8(std::string_view name) {
  while (!name.empty()) {
    const auto first = static_cast<unsigned char>(name.front());
    const std::size_t length = sequence_length(first);
    if (length == 0 || length > name.size()) {
      return false;
    }
    const std::string_view rest = name.substr(1, length - 1);
    const auto continues = [](char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; };
    if (!std::all_of(rest.begin(), rest.end(), continues) ||
        (length > 1 && !is_second_byte_allowed(first, static_cast<unsigned char>(rest.front())))) {
      return false;
    }
    name.remove_prefix(length);
  }
  return true;
}

}  // namespace headway::io
