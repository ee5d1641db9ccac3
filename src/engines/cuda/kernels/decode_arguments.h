// What the decode kernels take.
#pragma once

#include "engines/cuda/kernels/hopper_arguments.h"

namespace headway::cuda {

// Few queries over many keys: the keys are split over blocks, and what those find is merged.
struct DecodeArguments : ForwardArguments {
  std::int64_t splits;
  std::int64_t split_keys;  // keys of a split; 0: each sequence's own range divided evenly
  float* sums;              // [B, Hkv, splits, 16, sum_width(Dv)], relative to the highest score of the split
  float* statistics;        // [B, Hkv, splits, 16, 2]: highest score, sum of weights
  // For the copy engine, where it can read keys and values: boxes of 64 columns and rows.
  CUtensorMap key_map, value_map;
  MapSteps key_steps, value_steps;
};

// The floats of a row of sums: whole chunks of 16 bytes.
HEADWAY_HOST_DEVICE constexpr std::int64_t sum_width(std::int64_t value_dim) { return (value_dim + 3) / 4 * 4; }

}  // namespace headway::cuda
