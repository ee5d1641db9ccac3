// Names that come from files, in error texts.
#include "io/text_checks.h"

#include <cstddef>

namespace headway::io {

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

}  // namespace headway::io
