// Strict UTF-8: no overlong forms, no surrogates, nothing beyond Unicode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace headway {

// The length in bytes of the character that `text` begins with; 0 if it begins with none.
std::size_t utf8_length(std::string_view text);

bool is_utf8(std::string_view text);

// The number of one character, given in UTF-8.
std::uint32_t code_point(std::string_view character);

// Columns that a character takes on a terminal: 2 in East Asian scripts and of most emoji, 0 for a mark on the one
// before.
std::size_t terminal_columns(std::uint32_t code);

}  // namespace headway
