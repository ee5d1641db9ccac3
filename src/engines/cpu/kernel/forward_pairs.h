// Forward through bf16 dot products, where they are exact enough. The instruction takes denormal inputs for 0, so
// queries that are tiny or huge, or a scale that makes the tiny large again, go through the float kernel instead. Only
// the queries decide: what keys hold must not choose the kernel, since a masked key may hold anything.
#pragma once

#include "engines/cpu/kernel/forward.h"
#include "engines/cpu/kernel/scores.h"
#include "engines/cpu/kernels.h"

namespace headway::cpu {
namespace {

// Exponents e of bf16 2^e that a query may have so that products with flushed keys stay below 2^-56 of a unit.
constexpr int lowest_exponent = -76;
constexpr int highest_exponent = 50;
constexpr double highest_scale = 0x1p20;

HEADWAY_INLINE bool suits_pairs(bfloat16 x) {
  const int exponent = (x.bits >> 7) & 0xff;
  const bool zero = (x.bits & 0x7fff) == 0;
  const bool finite = exponent != 0xff;  // the others make their own row NaN in either kernel
  return zero || !finite || (exponent >= 127 + lowest_exponent && exponent < 127 + highest_exponent);
}

template <class S>
HEADWAY_NOINLINE bool queries_suit_pairs(const ForwardArgs& args, std::int64_t begin, std::int64_t end) {
  if (!(args.scale < highest_scale && args.scale > -highest_scale)) {
    return false;
  }
  const auto seen = Packing<S, bfloat16>::magnitudes(args.query, begin, end, args.head_dim);
  if (!seen.any_below((127 + lowest_exponent) << 7) && !seen.any_from((127 + highest_exponent) << 7)) {
    return true;
  }
  for (std::int64_t i = begin; i < end; ++i) {  // one that is not finite hides others
    const bfloat16* row = static_cast<const bfloat16*>(args.query.data) + i * args.query.row_stride;
    for (std::int64_t d = 0; d < args.head_dim; ++d) {
      if (!suits_pairs(row[d * args.query.column_stride])) {
        return false;
      }
    }
  }
  return true;
}

// Each panel goes its own way, so that a row's way does not depend on how panels are grouped into tasks. Rows of
// padding decide nothing.
template <template <class, class> class Kernel, class Pairs, class Plain>
void run_pairs(const ForwardArgs& args, void* scratch) {
  constexpr std::int64_t panel = Forward<Pairs, bfloat16>::width;
  const auto suits = [&](std::int64_t row) {
    return queries_suit_pairs<Pairs>(args, row, smaller(smaller(row + panel, args.row_end), args.ranges.real_queries));
  };
  ForwardArgs run = args;
  for (run.row_begin = args.row_begin; run.row_begin < args.row_end; run.row_begin = run.row_end) {
    const bool pairs = suits(run.row_begin);
    run.row_end = smaller(run.row_begin + panel, args.row_end);
    while (run.row_end < args.row_end && suits(run.row_end) == pairs) {
      run.row_end = smaller(run.row_end + panel, args.row_end);
    }
    if (pairs) {
      Kernel<Pairs, bfloat16>(run, scratch).run();
    } else {
      Kernel<Plain, bfloat16>(run, scratch).run();
    }
  }
}

template <class Pairs, class Plain>
std::int64_t forward_scratch_pairs(const ForwardArgs& args, std::int64_t panels) {
  return larger(Forward<Pairs, bfloat16>::scratch_bytes(args, panels),
                Forward<Plain, bfloat16>::scratch_bytes(args, panels));
}

template <class Pairs, class Plain>
constexpr ForwardKernel forward_pairs_kernel() {
  static_assert(Forward<Pairs, bfloat16>::width == Forward<Plain, bfloat16>::width);
  return {run_pairs<Forward, Pairs, Plain>, run_pairs<Scores, Pairs, Plain>,       forward_scratch_pairs<Pairs, Plain>,
          Forward<Pairs, bfloat16>::width,  Forward<Pairs, bfloat16>::most_panels, Forward<Pairs, bfloat16>::key_block};
}

}  // namespace
}  // namespace headway::cpu
