// UTF-8, strictly: nothing longer than needed, no surrogates, nothing beyond Unicode.
#pragma once

#include <cstddef>
#include <string_view>

namespace headway {

// How many bytes the character has that `text` begins with; 0 where it begins with none.
std::size_t utf8_length(std::string_view text);

bool is_utf8(std::string_view text);

}  // namespace headway
