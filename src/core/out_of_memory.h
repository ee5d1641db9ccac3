// Memory that the system refuses inside a public operation, whoever asked for it, becomes the library's own error:
//
//   void operation(...) try {
//     ...
//   } catch (...) {
//     throw_own_error("operation");
//   }
#pragma once

#include <string_view>

namespace headway {

// In a handler: throws OutOfMemory, "attention: could not allocate memory", for what allocators and containers throw,
// and anything else on. Where there is no memory even for the text, "headway: could not allocate memory" lies ready.
[[noreturn]] void throw_own_error(std::string_view operation);

}  // namespace headway
