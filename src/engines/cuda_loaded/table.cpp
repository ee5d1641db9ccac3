// In the library of the CUDA engine: its functions as a table.
#include "engines/cuda_loaded/table.h"

const headway::cuda::Table* HEADWAY_CUDA_TABLE() {
  using namespace headway;
  static constexpr cuda::Table table = {
      .engine = &cuda_engine,
      .take_memory = &take_device_memory,
      .give_back_memory = &give_back_device_memory,
      .clear_memory = &clear_device_memory,
      .copy = &copy_with_device,
      .linear_map = &cuda::linear,
      .linear_map_backward = &cuda::linear_backward,
      .analyze = &analyze_on_device,
      .weights = &weights_on_device,
      .map = &map_on_device,
      .mean_weights = &mean_weights_on_device,
      .rope = &rope_on_device,
      .append = &append_on_device,
  };
  return &table;
}
