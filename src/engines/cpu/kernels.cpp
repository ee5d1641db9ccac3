// Which instruction sets this machine has, and which one is used.
#include "engines/cpu/kernels.h"

#include <cstdlib>
#include <string>
#include <string_view>

#include "core/text.h"
#include "headway/error.h"

namespace headway::cpu {
namespace {

const Kernels& choose_kernels() {
  const std::vector<const Kernels*> available = available_kernels();
  const char* forced = std::getenv("HEADWAY_ISA");
  if (forced == nullptr || *forced == '\0') {
    return *available.front();
  }
  std::string names;
  for (const Kernels* kernels : available) {
    if (std::string_view(forced) == kernels->name) {
      return *kernels;
    }
    names += text(names.empty() ? "" : ", ", kernels->name);
  }
  throw InvalidArgument(text("HEADWAY_ISA: ", forced, " was asked for, this build on this CPU has ", names));
}

}  // namespace

const Kernels& chosen_kernels() {
  static const Kernels& kernels = choose_kernels();
  return kernels;
}

}  // namespace headway::cpu
