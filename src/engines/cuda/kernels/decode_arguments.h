// What the decode kernels take.
#pragma once

#include "engines/cuda/kernels/hopper_arguments.h"

namespace headway::cuda {

// Few queries over many keys.
struct DecodeArguments : ForwardArguments {
  SplitArguments split;
  std::int64_t split_keys;  // keys of a split; 0: each sequence's own range divided evenly
  // For the copy engine, where it can read keys and values: boxes of 64 columns and rows.
  CUtensorMap key_map, value_map;
  MapSteps key_steps, value_steps;
  int box_rows;  // of pages: rows of a box, all in one page; else 64
};

// What merges the splits: of the call, the output and what ends a row.
struct MergeArguments : ForwardArguments {
  SplitArguments split;
};

}  // namespace headway::cuda
