// Names that come from files, in error texts.
#pragma once

#include <string>
#include <string_view>

namespace headway::io {

// In quotes, short, and printable ASCII whatever the file holds.
std::string shown(std::string_view untrusted);

}  // namespace headway::io
