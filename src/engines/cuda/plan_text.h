// What a plan says about a launch.
#pragma once

#include "engines/cuda/kernels/kernels.h"
#include "headway/plan.h"

namespace headway::cuda {

void describe_launch(const Launch& launch, Plan& plan);

}  // namespace headway::cuda
