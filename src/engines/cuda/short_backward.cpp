#include "engines/cuda/short_backward.h"

#include <algorithm>
#include <limits>

#include "core/text.h"
#include "engines/cuda/hopper_backward.h"
#include "engines/cuda/kernels/short_gradient_kernels.h"
#include "engines/cuda/problem_arguments.h"

namespace headway::cuda {
namespace {

std::int64_t blocks_of(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

std::int64_t widest_head(const Problem& problem) { return std::max(problem.head_dim, problem.value_dim); }

// Tiles of queries that a block walks over.
std::int64_t walk_of(const Problem& problem) {
  return problem.heads / problem.kv_heads * blocks_of(problem.query_len, short_gradient_rows_a_tile);
}

}  // namespace

std::optional<std::string> short_backward_refusal(const Problem& problem) {
  if (auto reason = tensor_core_refusal(problem)) {
    return reason;
  }
  if (problem.batch == 0 || problem.heads == 0 || problem.query_len == 0 || problem.key_len == 0 ||
      problem.head_dim == 0 || problem.value_dim == 0) {
    return "a size of 0";
  }
  if (problem.spans) {
    return "spans";
  }
  if (auto reason = extreme_scale(problem)) {
    return reason;
  }
  // Which kernel runs depends on the longest sequence and on how many there are.
  if (problem.packed() || problem.batch_invariant) {
    return "packed sequences or batch_invariant, whose bits must not depend on the rest of the batch";
  }
  const std::int64_t most_keys = short_gradient_keys(widest_head(problem));
  if (problem.key_len > most_keys) {
    return text(problem.key_len, " keys, expected at most ", most_keys, " with heads ", widest_head(problem), " wide");
  }
  constexpr std::int64_t most_tasks = std::numeric_limits<int>::max(), longest_walk = 1 << 20;
  if (problem.batch * problem.kv_heads > most_tasks || walk_of(problem) > longest_walk) {
    return "more than 2^31 heads or 2^20 tiles of queries";
  }
  // A block walks over tiles of queries one after another; Hopper's side by side are done sooner where there is more
  // than one (on an H200, 64 x 64 of 20320 heads 0.84 ms here and 1.42 there, but 90 x 90 of 40 heads 33 us and 23).
  constexpr std::int64_t few_keys = 64;
  if ((walk_of(problem) > 1 || problem.key_len > few_keys) && !hopper_backward_refusal(problem)) {
    return text("hopper_backward is faster: ", walk_of(problem), " tiles of queries and ", problem.key_len,
                " keys, where one tile and ", few_keys, " keys would suit");
  }
  return std::nullopt;
}

}  // namespace headway::cuda
