// The headway command without its process: main handles signals.
#pragma once

#include <string>
#include <vector>

namespace headway::cli {

// Prints results on std::cout and errors as one line on std::cerr; returns the exit code.
int run_command_line(const std::vector<std::string>& arguments);

}  // namespace headway::cli
