// Building the texts of errors and plans.
#pragma once

#include <sstream>
#include <string>

namespace headway {

// text("key has head_dim ", 80) == "key has head_dim 80"
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  stream.exceptions(std::ios::badbit);  // otherwise a failed allocation would leave half a text
  (stream << ... << parts);
  return std::move(stream).str();
}

}  // namespace headway
