// Names that come from files or go into them.
#pragma once

#include <string>
#include <string_view>

namespace headway::io {

// For error texts: in quotes, short, and printable ASCII whatever the file holds.
std::string shown(std::string_view untrusted);

bool is_utf8(std::string_view name);

}  // namespace headway::io
