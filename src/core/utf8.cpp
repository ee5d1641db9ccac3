#include "core/utf8.h"

#include <algorithm>

namespace headway {
namespace {

// The length in bytes of a UTF-8 sequence with this first byte; 0 if no sequence begins with it.
std::size_t expected_length(unsigned char first) {
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

// Overlong forms, surrogates, and code points beyond Unicode: all of these show in the second byte.
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

std::size_t utf8_length(std::string_view text) {
  if (text.empty()) {
    return 0;
  }
  const auto first = static_cast<unsigned char>(text.front());
  const std::size_t length = expected_length(first);
  if (length == 0 || length > text.size()) {
    return 0;
  }
  const std::string_view rest = text.substr(1, length - 1);
  const auto continues = [](char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; };
  const bool complete = std::all_of(rest.begin(), rest.end(), continues) &&
                        (length == 1 || is_second_byte_allowed(first, static_cast<unsigned char>(rest.front())));
  return complete ? length : 0;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) {
      return false;
    }
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace headway
