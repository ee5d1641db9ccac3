// dK and dV from their parts, where the query heads that share a chunk of keys are shared out to several tasks: one
// part a set of heads, added in the order of the heads, in the storage type.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/pack.h"

namespace headway::cpu {
namespace {

// Rows [begin, end) of target [keys, columns] = the sum of parts [count][keys][columns].
template <class S, class In>
HEADWAY_NOINLINE void add_parts(const void* parts, int count, std::int64_t keys, std::int64_t columns,
                                const WritableMatrix& target, std::int64_t begin, std::int64_t end) {
  using Scalar = typename S::Scalar;
  if (target.data == nullptr) {
    return;
  }
  for (std::int64_t key = begin; key < end; ++key) {
    In* row = static_cast<In*>(target.data) + key * target.row_stride;
    for (std::int64_t d = 0; d < columns; d += S::lanes) {
      const int some = at_most(columns - d, S::lanes);
      typename S::Vector sum = S::zero();
      for (int part = 0; part < count; ++part) {
        sum = sum + S::load_first(static_cast<const Scalar*>(parts) + (part * keys + key) * columns + d, some);
      }
      store_row<S>(row, target.column_stride, d, some, sum);
    }
  }
}

// Keys [begin, end) of a kv head.
template <class S, class In>
HEADWAY_NOINLINE void sum_key_gradients(const BackwardArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t keys = args.ranges.keys;
  add_parts<S, In>(args.dk_parts, args.key_parts, keys, args.head_dim, args.dk, begin, end);
  add_parts<S, In>(args.dv_parts, args.key_parts, keys, args.value_dim, args.dv, begin, end);
}

}  // namespace
}  // namespace headway::cpu
