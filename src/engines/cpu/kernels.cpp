// The instruction sets of this machine, and the choice among them.
#include "engines/cpu/kernels.h"

#include <atomic>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/text.h"
#include "headway/error.h"

namespace headway::cpu {
namespace {

const Kernels& initial_kernels() {
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

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& chosen_kernels() {
  const Kernels* kernels = chosen.load(std::memory_order_acquire);
  if (kernels == nullptr) {
    kernels = &initial_kernels();
    chosen.store(kernels, std::memory_order_release);
  }
  return *kernels;
}

void choose_kernels(const Kernels& kernels) { chosen.store(&kernels, std::memory_order_release); }

}  // namespace headway::cpu
