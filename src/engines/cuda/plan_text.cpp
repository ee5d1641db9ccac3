#include "engines/cuda/plan_text.h"

#include "core/text.h"
#include "engines/cuda/device.h"

namespace headway::cuda {

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
