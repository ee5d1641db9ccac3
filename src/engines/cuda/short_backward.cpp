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

// ---- Which of two kernels is faster: microseconds on an H200, each within a third of what was measured ----

// Five products of 64 queries by `keys`, where a multiprocessor does so many million products with additions in a
// microsecond.
double products_us(std::int64_t keys, std::int64_t head_dim, std::int64_t value_dim, double rate) {
  constexpr double queries = 64;
  return queries * static_cast<double>(keys) * static_cast<double>(3 * head_dim + 2 * value_dim) * 1e-6 / rate;
}

// One launch; a step is a chain of five products, and steps of several blocks share a multiprocessor.
double short_us(const Problem& problem) {
  constexpr double launches = 5, shortest_step = 2, rate = 1;
  const auto multiprocessors = static_cast<double>(device_of(problem).multiprocessors);
  const auto tasks = static_cast<double>(problem.batch * problem.kv_heads),
             walk = static_cast<double>(walk_of(problem));
  const double step = products_us(blocks_of(problem.key_len, 16) * 16, problem.head_dim, problem.value_dim, rate);
  return launches + std::max(walk * std::max(step, shortest_step), tasks * walk * step / multiprocessors);
}

// Four launches; a block has a multiprocessor to itself and pays for its start and end, and tiles are padded.
double hopper_us(const Problem& problem) {
  constexpr double launches = 18, block = 7, rate = 1.9;
  const Launch launch = hopper_backward_launch(problem);
  const std::int64_t width = blocks_of(widest_head(problem), 64) * 64;
  const double step = products_us(launch.key_block, width, width, rate);
  const double walk = static_cast<double>(walk_of(problem)) / static_cast<double>(hopper_backward_parts(problem));
  return launches +
         static_cast<double>(blocks_of(launch.tasks, device_of(problem).multiprocessors)) * (block + walk * step);
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
  if (has_extreme_scale(problem)) {
    return text("scale ", problem.scale, " is extreme");
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
  if (!hopper_backward_refusal(problem) && hopper_us(problem) < short_us(problem)) {
    return text("hopper_backward is expected to be faster: a block would walk over ", walk_of(problem),
                " tiles of queries");
  }
  return std::nullopt;
}

}  // namespace headway::cuda
