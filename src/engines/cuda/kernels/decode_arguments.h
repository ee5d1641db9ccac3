// What the decode kernels take.
#pragma once

#include "engines/cuda/kernels/hopper_arguments.h"

namespace headway::cuda {

constexpr int decode_most_cluster = 8;  // blocks

// So many splits of a row are added up one after another, whoever merges them; of more, the groups of threads that have
// four features each (merge_splits.cuh) add up some first.
constexpr int merge_threads = 256;
HEADWAY_HOST_DEVICE constexpr std::int64_t splits_in_order(std::int64_t value_dim) {
  const std::int64_t quads = sum_width(value_dim) / 4;
  return quads == 0 || quads > merge_threads ? 1 : merge_threads / quads;
}

// Few queries over many keys.
struct DecodeArguments : ForwardArguments {
  SplitArguments split;
  std::int64_t split_keys;  // keys of a split; 0: each sequence's own range divided evenly
  int cluster;  // blocks of a cluster, which have all splits of a tile; 1: splits are merged by another kernel
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
