// main() for tests that run once per instruction set: HEADWAY_ISA names one, and where this CPU lacks it the test is
// skipped (exit code 77) instead of failing.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string_view>

#include "engines/cpu/kernels.h"

namespace {

bool is_available(std::string_view name) {
  for (const headway::cpu::Kernels* kernels : headway::cpu::available_kernels()) {
    if (name == kernels->name) {
      return true;
    }
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const char* wanted = std::getenv("HEADWAY_ISA");
  if (wanted != nullptr && !is_available(wanted)) {
    std::cout << "skipped: this CPU has no " << wanted << '\n';
    return 77;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
