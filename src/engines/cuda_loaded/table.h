// What the library of the CUDA engine gives to libheadway: every function that the rest of the library calls there.
#pragma once

#include "analysis/on_device.h"
#include "core/device_memory.h"
#include "core/engine.h"
#include "engines/cuda/linear.h"
#include "serving/on_device.h"

namespace headway::cuda {

struct Table {
  decltype(&cuda_engine) engine;
  decltype(&take_device_memory) take_memory;
  decltype(&give_back_device_memory) give_back_memory;
  decltype(&clear_device_memory) clear_memory;
  decltype(&copy_with_device) copy;
  decltype(&linear) linear_map;
  decltype(&linear_backward) linear_map_backward;
  decltype(&analyze_on_device) analyze;
  decltype(&weights_on_device) weights;
  decltype(&map_on_device) map;
  decltype(&mean_weights_on_device) mean_weights;
  decltype(&rope_on_device) rope;
  decltype(&append_on_device) append;
};

}  // namespace headway::cuda

// The one symbol that libheadway looks up; CMakeLists.txt names it, differently for each build.
extern "C" __attribute__((visibility("default"))) const headway::cuda::Table* HEADWAY_CUDA_TABLE();
