// dQ from its partials: one partial per chunk of keys (and what it lost), added in the chunks' order, times the scale,
// in the storage type. Each partial is read once and dQ is written once; memory bounds it, next to keys x D
// multiplications a row before.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/row_blocks.h"
#include "engines/cpu/kernel/score_factor.h"

namespace headway::cpu {
namespace {

// The partials of one block of rows that chunks have written: those whose keys the block reaches.
template <class Scalar>
struct Partials {
  const Scalar* first_row[2 * most_key_chunks];
  int count = 0;
};

template <class S>
HEADWAY_INLINE Partials<typename S::Scalar> partials_of(const BackwardArgs& args, const BackwardHead& head,
                                                        const RowBlock& block) {
  Partials<typename S::Scalar> partials{};
  for (int c = 0; c < args.chunks.count; ++c) {
    if (block_sees_any(head.ranges, block, {args.chunks.begin[c], args.chunks.begin[c + 1]})) {
      const std::int64_t first = (c * args.queries + block.begin) * padded<S>(args.head_dim);
      partials.first_row[partials.count++] = static_cast<const typename S::Scalar*>(head.dq_partials) + first;
      if (head.dq_lost != nullptr) {
        partials.first_row[partials.count++] = static_cast<const typename S::Scalar*>(head.dq_lost) + first;
      }
    }
  }
  return partials;
}

// Rows [row_begin, row_end) of a head's dQ; row_begin is a multiple of query_block, and row_end is one or the last row.
template <class S, class In>
HEADWAY_NOINLINE void sum_query_gradients(const BackwardArgs& args, const BackwardHead& head, std::int64_t row_begin,
                                          std::int64_t row_end) {
  using Vector = typename S::Vector;
  const std::int64_t ld = padded<S>(args.head_dim);
  const Scaling<S> scaled(args.scale);
  for (std::int64_t b = row_begin / query_block; b * query_block < row_end; ++b) {
    const RowBlock block = row_block(args, head.ranges, b);
    const auto partials = partials_of<S>(args, head, block);
    for (std::int64_t r = 0; r < block.count; ++r) {
      In* row = static_cast<In*>(head.dq.data) + (block.begin + r) * head.dq.row_stride;
      for (std::int64_t d = 0; d < args.head_dim; d += S::lanes) {
        Vector sum = S::zero();
        for (int c = 0; c < partials.count; ++c) {
          sum = sum + S::load(partials.first_row[c] + r * ld + d);
        }
        store_row<S>(row, head.dq.column_stride, d, at_most(args.head_dim - d, S::lanes), scaled(sum));
      }
    }
  }
}

}  // namespace
}  // namespace headway::cpu
