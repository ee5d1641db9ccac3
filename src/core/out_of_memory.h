// An allocation that fails inside a public operation, whoever made it, becomes the library's own error:
//
//   void operation(...) try {
//     ...
//   } catch (...) {
//     throw_own_error("operation");
//   }
#pragma once

#include <string_view>

namespace headway {

// Call it in a handler: throws OutOfMemory, "attention: could not allocate memory", in place of what allocators and
// containers throw, and rethrows anything else. If there is no memory even for that text, throws a preallocated
// "headway: could not allocate memory".
[[noreturn]] void throw_own_error(std::string_view operation);

}  // namespace headway
