#include "headway/printable.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "core/utf8.h"
#include "headway/error.h"

namespace headway {
namespace {

bool acts_on_terminal(std::uint32_t code) {
  const auto between = [code](std::uint32_t first, std::uint32_t last) { return code >= first && code <= last; };
  return code < 0x20 || between(0x7f, 0x9f) ||  // control characters; U+009B begins a sequence as ESC [ does
         between(0x2028, 0x2029) ||             // ends of lines and paragraphs
         code == 0x061c || between(0x200e, 0x200f) || between(0x202a, 0x202e) || between(0x2066, 0x2069);  // direction
}

std::string escaped(const char* form, std::uint32_t code) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, form, static_cast<unsigned>(code));
  return buffer;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(length, 1));
    const std::uint32_t code = length == 0 ? static_cast<unsigned char>(text.front()) : code_point(character);
    if (length != 0 && !acts_on_terminal(code)) {
      result += character;
    } else {
      result += escaped(length > 1 ? "\\u%04x" : "\\x%02x", code);
    }
    text.remove_prefix(character.size());
  }
  return result;
}

Error::Error(std::string_view text) : std::runtime_error(printable(text)) {}

}  // namespace headway
