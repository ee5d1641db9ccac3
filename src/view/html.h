// A page in one file, put together from its parts: markup, style, script and data. Nothing else may run in it.
#pragma once

#include <cstdint>
#include <string>

namespace headway::view {

// Texts from viewer/. The markup has @STYLE@, @SCRIPT@, @DATA@, @NONCE@ and @CONNECT@ where the others go.
struct PageParts {
  const char* markup;
  const char* style;
  const char* script;
};

// Whom the page's script may ask for more.
enum class Connect : std::uint8_t { nowhere, own_server };

// `data` is JSON, and stays data whatever its texts hold.
std::string assembled(const PageParts& parts, const std::string& data, Connect connect);

}  // namespace headway::view
