#include "engines/cuda/gradient_parts.h"

#include <algorithm>

namespace headway::cuda {
namespace {

// Of one gradient: [B,H,S,D].
struct Numbers {
  std::int64_t heads, rows, width;
};

Numbers numbers_of(const Problem& problem, GradientOf of) {
  const bool query = of == GradientOf::query;
  return {query ? problem.heads : problem.kv_heads, query ? problem.query_len : problem.key_len,
          of == GradientOf::value ? problem.value_dim : problem.head_dim};
}

std::size_t one_gradient_bytes(const Problem& problem, GradientOf of, int parts) {
  const auto [heads, rows, width] = numbers_of(problem, of);
  return Workspace::rounded(sizeof(float) * static_cast<std::size_t>(problem.batch * heads * rows * width * parts));
}

}  // namespace

int gradient_parts(const Problem& problem, GradientOf of, const Launch& whole) {
  // A pack's sequences have their bits in any pack.
  if (problem.packed() || problem.batch_invariant || whole.tasks == 0) {
    return 1;
  }
  // As many blocks as run at once; or twice as many, since with ranges the walks of tiles differ in length, where parts
  // stay long beside what each costs (on an H200, causal 512 x 512 of 8 heads of 64 takes 93 us in 4 parts, 110 in 8).
  // A part of fewer steps than two would take longer to begin than to run.
  constexpr std::int64_t many_steps = 6, least_steps = 2;
  const std::int64_t at_once = std::int64_t{whole.resident} * device_of(problem).multiprocessors;
  const bool query = of == GradientOf::query;
  const std::int64_t rows = query ? problem.key_len : problem.query_len;
  const std::int64_t block = query ? whole.key_block : whole.query_block;
  const std::int64_t steps = (rows + block - 1) / block * (query ? 1 : problem.heads / problem.kv_heads);
  const std::int64_t wanted = std::max(at_once / whole.tasks, std::min(2 * at_once / whole.tasks, steps / many_steps));
  return static_cast<int>(std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(steps / least_steps, 1)));
}

std::size_t gradient_part_bytes(const Problem& problem, GradientOf of, int parts) {
  if (parts == 1) {
    return 0;
  }
  return of == GradientOf::query ? one_gradient_bytes(problem, of, parts)
                                 : one_gradient_bytes(problem, GradientOf::key, parts) +
                                       one_gradient_bytes(problem, GradientOf::value, parts);
}

GradientPartsArguments place_gradient_parts(const Problem& problem, GradientOf of, int parts, const Rows& gradient,
                                            std::byte*& memory) {
  const auto [heads, rows, width] = numbers_of(problem, of);
  GradientPartsArguments result{};
  result.gradient = gradient;
  result.parts = {gradient.data == nullptr ? nullptr : memory, heads * rows * width, rows * width, width, 1, false};
  result.part_step = problem.batch * heads * rows * width;
  result.count = parts;
  result.batch = problem.batch, result.heads = heads, result.rows = rows, result.width = width;
  memory += one_gradient_bytes(problem, of, parts);
  return result;
}

}  // namespace headway::cuda
