#include "core/utf8.h"

#include <algorithm>
#include <iterator>

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

std::uint32_t code_point(std::string_view character) {
  const auto first = static_cast<unsigned char>(character.front());
  std::uint32_t code = character.size() == 1 ? first : first & (0x7fu >> character.size());
  for (const char byte : character.substr(1)) {
    code = code << 6 | (static_cast<unsigned char>(byte) & 0x3fu);
  }
  return code;
}

std::size_t terminal_columns(std::uint32_t code) {
  struct Block {
    std::uint32_t first, last;
  };
  const auto within = [code](const auto& blocks) {
    return std::any_of(std::begin(blocks), std::end(blocks),
                       [code](const Block& block) { return code >= block.first && code <= block.last; });
  };
  // Whole blocks: what is narrow or unused inside of them no token holds.
  static constexpr Block marks[] = {{0x300, 0x36f},   {0x591, 0x5bd},   {0x64b, 0x65f},   {0x93c, 0x93c},
                                    {0x941, 0x948},   {0x94d, 0x94d},   {0xe34, 0xe3a},   {0xe47, 0xe4e},
                                    {0x200b, 0x200f}, {0x20d0, 0x20ff}, {0xfe00, 0xfe0f}, {0xfeff, 0xfeff}};
  static constexpr Block wide[] = {{0x1100, 0x115f},   {0x2e80, 0x303e},   {0x3041, 0xa4cf},   {0xac00, 0xd7a3},
                                   {0xf900, 0xfaff},   {0xfe30, 0xfe4f},   {0xff00, 0xff60},   {0xffe0, 0xffe6},
                                   {0x1f300, 0x1f64f}, {0x1f680, 0x1f6ff}, {0x1f900, 0x1faff}, {0x20000, 0x3fffd}};
  return within(marks) ? 0 : within(wide) ? 2 : 1;
}

}  // namespace headway
