// Texts that came from elsewhere (names in files, tokens, arguments), for a terminal or a log.
#pragma once

#include <string>
#include <string_view>

#include "headway/cxx20.h"

#pragma GCC visibility push(default)
namespace headway {

// The same text on one line that does nothing but show: control characters, those that end a line or change its
// direction, and bytes that are no UTF-8 become escapes like \x1b and \u202e. Every other character stays.
std::string printable(std::string_view text);

}  // namespace headway
#pragma GCC visibility pop
