// One part of a longer call, with the offset that it has in the whole.
#include <algorithm>
#include <cstdlib>

#include "core/engine.h"
#include "core/out_of_memory.h"
#include "core/text.h"
#include "core/validate.h"
#include "headway/distributed.h"

namespace headway::distributed {
namespace {

// Far outside every axis, and small enough that adding lengths does not overflow.
constexpr std::int64_t furthest = std::int64_t{1} << 60;

// With a given offset, all alignments mean the same.
AttentionOptions aligned(AttentionOptions options) {
  options.causal = options.causal == Causal::none ? Causal::none : Causal::top_left;
  return options;
}

void check(const char* operation, std::int64_t offset, const AttentionOptions& options) {
  if (offset < -furthest || offset > furthest) {
    throw InvalidArgument(text(operation, ": offset is ", offset, ", expected at most 2^60 either way"));
  }
  if (options.dropout != 0) {
    throw Unsupported(
        text(operation, ": dropout is ", options.dropout, "; dropout over a split sequence is not supported yet"));
  }
}

// Windows were cut to the lengths of the part, which may lie further away than it is long.
void place(Problem& problem, std::int64_t offset, const std::optional<Window>& window) {
  problem.offset = offset;
  if (window) {
    const std::int64_t reach = std::abs(offset) + problem.query_len + problem.key_len;
    const auto cut = [&](const std::optional<std::int64_t>& side) {
      return side ? std::optional(std::min(*side, reach)) : side;
    };
    problem.window_left = cut(window->left);
    problem.window_right = cut(window->right);
  }
}

}  // namespace

void attention_part(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out,
                    std::int64_t offset, const AttentionOptions& options, const AttentionOutputs& outputs) try {
  constexpr const char* operation = "distributed::attention_part";
  check(operation, offset, options);
  const AttentionOptions used = aligned(options);
  ForwardProblem problem = forward_problem(
      {.operation = operation, .query = query, .key = key, .value = value, .options = used}, out, outputs);
  place(problem, offset, used.window);
  run(problem, &EngineBase::forward);
} catch (...) {
  throw_own_error("distributed::attention_part");
}

void attention_part_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key,
                             ConstTensorView value, ConstTensorView out, ConstTensorView lse,
                             const AttentionGradients& gradients, std::int64_t offset,
                             const AttentionOptions& options) try {
  constexpr const char* operation = "distributed::attention_part_backward";
  check(operation, offset, options);
  const AttentionOptions used = aligned(options);
  BackwardProblem problem =
      backward_problem({.operation = operation, .query = query, .key = key, .value = value, .options = used}, grad_out,
                       out, lse, gradients);
  place(problem, offset, used.window);
  problem.of_longer_rows = true;
  run(problem, &EngineBase::backward);
} catch (...) {
  throw_own_error("distributed::attention_part_backward");
}

}  // namespace headway::distributed
