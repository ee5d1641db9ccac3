// The headway command.
#include <algorithm>

#include "command_line.h"
#include "interrupt.h"

int main(int argc, char** argv) {
  headway::cli::catch_interrupts();
  return headway::cli::run_command_line({argv + std::min(argc, 1), argv + argc});
}
