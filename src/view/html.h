// A page in one file, assembled from markup, style, script and data. Nothing else can run in it.
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

// The host that the page's script may connect to.
enum class Connect : std::uint8_t { nowhere, own_server };

// `data` is JSON and is never executed, whatever its texts contain.
std::string assembled(const PageParts& parts, const std::string& data, Connect connect);

}  // namespace headway::view
