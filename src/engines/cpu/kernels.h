// The kernels of one instruction set, and the choice among those that this machine has.
#pragma once

#include <cstdint>
#include <vector>

#include "engines/cpu/kernel/args.h"

namespace headway::cpu {

struct ForwardKernel {
  void (*run)(const ForwardArgs& args, void* scratch);
  void (*run_scores)(const ForwardArgs& args, void* scratch);  // args.weights takes the scores before the softmax
  std::int64_t (*scratch_bytes)(const ForwardArgs& args, std::int64_t panels);
  int panel_rows;  // queries that one panel holds
};

struct Kernels {
  const char* name;
  ForwardKernel forward[4];  // by Storage
};

// Each defined in isa/, where the build's machine has it.
const Kernels& scalar_kernels();
const Kernels& neon_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();

// The instruction sets that this build has and this CPU runs, the fastest first.
std::vector<const Kernels*> available_kernels();

// The fastest, or the one that HEADWAY_ISA names; InvalidArgument when this machine does not have that one.
const Kernels& chosen_kernels();

}  // namespace headway::cpu
