// Forward through bf16 dot products, where they are exact enough. The instruction treats denormal inputs as 0, so rows
// with tiny or huge queries, and all rows if the scale is tiny or huge, use the float kernel instead. Only a row's own
// query decides: neither keys, since a masked key may hold anything, nor other rows of its panel may choose the kernel.
#pragma once

#include "engines/cpu/kernel/forward.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/scores.h"
#include "engines/cpu/kernels.h"

namespace headway::cpu {
namespace {

// Exponents e of bf16 2^e that a query may have so that products with flushed keys stay below 2^-56 of a unit. An
// infinite one would give NaN with a key that is flushed, where a softcap makes a finite score of infinity.
constexpr int lowest_exponent = -76;
constexpr int highest_exponent = 50;
constexpr double lowest_scale = 0x1p-50;  // that leaves the lowest query normal
constexpr double highest_scale = 0x1p20;

HEADWAY_INLINE bool scale_suits_pairs(double scale) {
  const double size = scale < 0 ? -scale : scale;
  return size >= lowest_scale && size < highest_scale;
}

HEADWAY_INLINE bool suits_pairs(bfloat16 x) {
  const int exponent = (x.bits >> 7) & 0xff;
  const bool zero = (x.bits & 0x7fff) == 0;
  const bool nan = (x.bits & 0x7fff) > 0x7f80;  // it makes its own row NaN in either kernel
  return zero || nan || (exponent >= 127 + lowest_exponent && exponent < 127 + highest_exponent);
}

// Bit r: whether query row begin + r suits, for up to 64 rows.
template <class S>
HEADWAY_NOINLINE std::uint64_t rows_that_suit_pairs(const ForwardArgs& args, std::int64_t begin, std::int64_t end) {
  if (!scale_suits_pairs(args.scale)) {
    return 0;
  }
  const auto seen = Packing<S, bfloat16>::magnitudes(args.query, begin, end, args.head_dim);
  if (!seen.any_below((127 + lowest_exponent) << 7) && !seen.any_from((127 + highest_exponent) << 7)) {
    return low_bits(end - begin);
  }
  std::uint64_t suiting = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const bfloat16* row = static_cast<const bfloat16*>(args.query.data) + i * args.query.row_stride;
    bool suits = true;
    for (std::int64_t d = 0; suits && d < args.head_dim; ++d) {
      suits = suits_pairs(row[d * args.query.column_stride]);
    }
    suiting |= static_cast<std::uint64_t>(suits) << (i - begin);
  }
  return suiting;
}

// Rows of a panel and those among them that suit; rows of padding suit either kernel.
struct SuitingRows {
  std::uint64_t real, suiting;
  bool all() const { return suiting == real; }
  bool none() const { return suiting == 0 && real != 0; }
};

template <template <class, class> class Kernel, class Pairs, class Plain>
void run_pairs(const ForwardArgs& args, void* scratch) {
  constexpr std::int64_t panel = ForwardSizes<Pairs>::width;
  static_assert(panel <= 64);
  const auto find = [&](std::int64_t row) -> SuitingRows {
    const std::int64_t end = smaller(smaller(row + panel, args.row_end), args.ranges.real_queries);
    return {low_bits(larger(end - row, 0)), row < end ? rows_that_suit_pairs<Pairs>(args, row, end) : 0};
  };
  ForwardArgs run = args;
  for (run.row_begin = args.row_begin; run.row_begin < args.row_end; run.row_begin = run.row_end) {
    const SuitingRows rows = find(run.row_begin);
    run.row_end = smaller(run.row_begin + panel, args.row_end);
    run.stored_rows = ~std::uint64_t{0};
    if (!rows.all() && !rows.none()) {  // both ways, each for its own rows
      run.stored_rows = rows.suiting;
      Kernel<Pairs, bfloat16>(run, scratch).run();
      run.stored_rows = ~rows.suiting;
      Kernel<Plain, bfloat16>(run, scratch).run();
      continue;
    }
    for (; run.row_end < args.row_end; run.row_end = smaller(run.row_end + panel, args.row_end)) {
      const SuitingRows next = find(run.row_end);
      if (rows.all() ? !next.all() : !next.none()) {
        break;
      }
    }
    if (rows.all()) {
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
  static_assert(ForwardSizes<Pairs>::width == ForwardSizes<Plain>::width);
  return {run_pairs<Forward, Pairs, Plain>, run_pairs<Scores, Pairs, Plain>,  forward_scratch_pairs<Pairs, Plain>,
          ForwardSizes<Pairs>::width,       ForwardSizes<Pairs>::most_panels, ForwardSizes<Pairs>::key_block};
}

}  // namespace
}  // namespace headway::cpu
