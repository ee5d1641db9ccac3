// One rank's side of a call: the common parts of the executors.
#pragma once

#include <optional>
#include <vector>

#include "distributed/part.h"
#include "distributed/row_store.h"
#include "distributed/schedule_parts.h"
#include "headway/distributed.h"

namespace headway::distributed {

struct Run {
  Transport& transport;
  const Schedule& schedule;
  Whole whole;  // with sinks
  // This rank's rows, [B,H,n,D], packed with B = 1.
  ConstTensorView query, key, value;

  int rank() const { return transport.rank(); }
  const Shard& queries() const { return schedule.sharding.queries[static_cast<std::size_t>(rank())]; }
  const Shard& keys() const { return schedule.sharding.keys[static_cast<std::size_t>(rank())]; }
  const Sizes& sizes() const { return schedule.sizes; }
  // Partial results, and sums of gradients, travel in this type.
  DType accumulator() const { return sizes().dtype == DType::f64 ? DType::f64 : DType::f32; }
  Whole without_sinks() const {
    Whole result = whole;
    result.problem.sinks.reset();
    return result;
  }
};

struct ForwardRun : Run {
  TensorView out;  // [B,H,n,Dv]
  TensorView lse;  // [B,H,n]
};

struct BackwardRun : Run {
  ConstTensorView grad_out, out, lse;
  std::optional<TensorView> dq, dk, dv;
  std::optional<TensorView> bias_sums;  // see PartGradients
};

void forward_over_keys(const ForwardRun& run);     // ring, all_gather
void forward_over_heads(const ForwardRun& run);    // heads, hybrid
void forward_over_queries(const ForwardRun& run);  // pass_query
void backward_over_keys(const BackwardRun& run);
void backward_over_heads(const BackwardRun& run);

// Which rows of [B,n] are padding by query_lens; empty if the whole call has no padding.
std::optional<std::vector<bool>> padding_of(const Run& run, Rows queries);

}  // namespace headway::distributed
