// Decode with scores by bf16 dot products, where they are exact enough for the queries (forward_pairs.h says when); the
// weighted sums of values are in float either way. All rows of a kv head go the same way.
#pragma once

#include "engines/cpu/kernel/decode.h"
#include "engines/cpu/kernel/decode_finish.h"
#include "engines/cpu/kernel/forward_pairs.h"
#include "engines/cpu/kernels.h"

namespace headway::cpu {
namespace {

template <class Pairs>
HEADWAY_NOINLINE bool heads_suit_pairs(const DecodeArgs& args) {
  for (std::int64_t h = 0; h < args.group; ++h) {
    const ForwardArgs& head = args.heads[h];
    if (!queries_suit_pairs<Pairs>(head, 0, smaller(args.queries, head.ranges.real_queries))) {
      return false;
    }
  }
  return true;
}

template <class Pairs, class Plain>
void run_decode_pairs(const DecodeArgs& args, std::int64_t chunk, void* scratch) {
  if (heads_suit_pairs<Pairs>(args)) {
    Decode<Pairs, bfloat16>(args, scratch).run(chunk);
  } else {
    Decode<Plain, bfloat16>(args, scratch).run(chunk);
  }
}

template <class Pairs, class Plain>
void run_decode_weights_pairs(const DecodeArgs& args, std::int64_t chunk, void* scratch) {
  if (heads_suit_pairs<Pairs>(args)) {
    Decode<Pairs, bfloat16>(args, scratch).run_weights(chunk);
  } else {
    Decode<Plain, bfloat16>(args, scratch).run_weights(chunk);
  }
}

template <class Pairs, class Plain>
std::int64_t decode_scratch_pairs(const DecodeArgs& args) {
  return larger(Decode<Pairs, bfloat16>::scratch_bytes(args), Decode<Plain, bfloat16>::scratch_bytes(args));
}

template <class Pairs, class Plain>
DecodeKernel decode_pairs_kernel(const DecodeKernel& plain) {
  static_assert(Pairs::lanes == Plain::lanes);  // partials of both look alike
  DecodeKernel kernel = plain;
  kernel.run = run_decode_pairs<Pairs, Plain>;
  kernel.run_weights = run_decode_weights_pairs<Pairs, Plain>;
  kernel.scratch_bytes = decode_scratch_pairs<Pairs, Plain>;
  return kernel;
}

}  // namespace
}  // namespace headway::cpu
