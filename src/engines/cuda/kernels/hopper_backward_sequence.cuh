// A sequence of the call as the backward's tiles see it.
#pragma once

#include "engines/cuda/kernels/hopper_backward_arguments.h"
#include "engines/cuda/key_range.cuh"

namespace headway::cuda {

__device__ __forceinline__ BackwardSequence sequence_order(const HopperBackwardArguments& args,
                                                           const Sequence& sequence, std::int64_t batch,
                                                           std::uint8_t row_bits, std::uint8_t key_bits) {
  BackwardSequence order{};
  order.shape = args.shape;
  order.row_bits = row_bits;
  order.key_bits = key_bits;
  order.group = static_cast<int>(args.group);
  order.real_queries = static_cast<int>(sequence.real_queries);
  order.valid_keys = static_cast<int>(args.own_ends ? sequence.key_count : valid_len(args, sequence, batch, 0));
  order.left = args.left;
  order.right = args.right;
  order.offset = static_cast<int>(sequence.offset);
  order.chunk = args.chunk;
  return order;
}

}  // namespace headway::cuda
