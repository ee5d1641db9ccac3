// The headway command but for its process, whose signals are main's.
#pragma once

#include <string>
#include <vector>

namespace headway::cli {

// Results on std::cout, what went wrong as one line on std::cerr; returns the exit code.
int run_command_line(const std::vector<std::string>& arguments);

}  // namespace headway::cli
