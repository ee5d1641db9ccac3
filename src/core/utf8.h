// Strict UTF-8: no overlong forms, no surrogates, nothing beyond Unicode.
#pragma once

#include <cstddef>
#include <string_view>

namespace headway {

// The length in bytes of the character that `text` begins with; 0 if it begins with none.
std::size_t utf8_length(std::string_view text);

bool is_utf8(std::string_view text);

}  // namespace headway
