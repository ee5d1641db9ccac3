// Makes untrusted text (names in files, tokens, arguments) safe for a terminal or a log.
#pragma once

#include <string>
#include <string_view>

#include "headway/cxx20.h"

#pragma GCC visibility push(default)
namespace headway {

// The same text on one line, without other effects on a terminal: control characters, characters that end a line or
// change the text's direction, and bytes that are not UTF-8 become escapes like \x1b and \u202e. All other characters
// are unchanged.
std::string printable(std::string_view text);

}  // namespace headway
#pragma GCC visibility pop
