// How the progress of a layer's pass divides among its stages: by their FLOPs.
#pragma once

#include <string_view>

#include "core/linear.h"
#include "core/progress.h"
#include "layer/state.h"

namespace headway {

// FLOPs of each projection and of attention without masks, forward. Backward costs 2 and 2.5 times as much.
struct StageFlops {
  double query, key, value, attention, output;

  StageFlops(const MultiHeadAttentionConfig& config, const LayerInputs& inputs) {
    const auto number = [](std::int64_t n) { return static_cast<double>(n); };
    const double queries = number(inputs.queries.size(0)) * number(inputs.queries.size(1));
    const double keys = number(inputs.keys.size(0)) * number(inputs.keys.size(1));
    const double query_width = number(config.heads * config.head_dim);
    const double kv_width = number(config.kv_heads * config.head_dim);
    query = output = 2 * queries * number(config.model_dim) * query_width;
    key = 2 * keys * number(config.key_dim) * kv_width;
    value = 2 * keys * number(config.value_dim) * kv_width;
    attention = 4 * queries * number(inputs.keys.size(1)) * query_width;
  }

  // The share of the projections with these letters, out of q, k and v.
  double of(std::string_view letters) const {
    double sum = 0;
    for (const char letter : letters) {
      sum += letter == 'q' ? query : letter == 'k' ? key : value;
    }
    return sum;
  }

  double projections() const { return query + key + value + output; }
};

// Gives each stage the caller's progress callback, scaled to the stage's share. The options must outlive it.
class Stages {
 public:
  Stages(std::string_view operation, const AttentionOptions& options, double flops)
      : operation_(operation), options_(options), flops_(flops) {}

  Progress next(double flops) {
    const double begin = share();
    done_ += flops;
    return part_of(options_.progress, begin, share());
  }
  LinearCall next_linear(double flops) { return {operation_, next(flops), options_.stream, options_.batch_invariant}; }

 private:
  double share() const { return flops_ > 0 ? done_ / flops_ : 0; }

  std::string_view operation_;
  const AttentionOptions& options_;
  double flops_;
  double done_ = 0;
};

}  // namespace headway
