// The whole call as one Problem without data: validates the options as in any call; the ranks' parts are cut from it.
#pragma once

#include <optional>
#include <string_view>

#include "core/problem.h"
#include "headway/distributed.h"

namespace headway::distributed {

// A view of any shape over a single element, for arguments that are checked and never read.
ConstTensorView shape_only(DType dtype, const Dims& sizes);

struct GlobalCall {
  std::string_view operation;  // must outlive the problem
  const Sizes& sizes;
  const AttentionOptions& options;  // without bool mask and bias, whose rows are those of one rank
  const std::optional<Packing>& packing;
  Pass pass = Pass::forward;
  int rank = 4;  // of the user's tensors: options lack the axes that they lack
};
Problem global_problem(const GlobalCall& call);

// The entry of valid_lens for row i of batch item b (both inside its sequence).
std::int64_t valid_length(const Problem& problem, std::int64_t b, std::int64_t i);

Seen seen_by(const Problem& problem);

}  // namespace headway::distributed
