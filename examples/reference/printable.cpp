#include "examples.h"

using namespace headway;

namespace {

void example_printable() {
  std::cout << printable("a name\x1b[2J that clears the screen") << '\n';  // a name\x1b[2J that clears the screen
}

}  // namespace

void printable_examples() { example_printable(); }
