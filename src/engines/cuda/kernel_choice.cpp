#include "engines/cuda/kernel_choice.h"

#include "core/text.h"

namespace headway::cuda {

Refusal shared_refusal(const Launch& launch, std::size_t own, const DeviceProperties& device) {
  const std::size_t needed = launch.shared_bytes + own;
  if (needed <= static_cast<std::size_t>(device.shared_bytes)) {
    return std::nullopt;
  }
  return text("a block needs ", needed, " bytes of shared memory, and compute capability ", device.major, ".",
              device.minor, " has ", device.shared_bytes);
}

void describe_launch(const Launch& launch, Plan& plan) {
  const KernelResources resources = kernel_resources(launch.kernel);
  plan.kernel = launch.name;
  plan.query_block = launch.query_block;
  plan.key_block = launch.key_block;
  plan.tasks = launch.tasks;
  plan.threads = launch.threads;
  plan.splits = static_cast<int>(launch.splits);
  plan.stages = launch.stages;
  plan.registers = resources.registers;
  plan.shared_bytes = static_cast<std::int64_t>(launch.shared_bytes) + resources.static_shared;
}

}  // namespace headway::cuda
