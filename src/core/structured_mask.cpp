#include "core/structured_mask.h"

#include "core/checks.h"
#include "masks/resolve.h"

namespace headway {
namespace {

void check_axis(const Problem& problem, const char* axis, std::int64_t found, std::int64_t expected) {
  if (found != 1 && found != expected) {
    invalid(problem, "mask has ", found, " ", axis, ", expected ", expected, " or 1");
  }
}

std::shared_ptr<const ResolvedMask> resolved(const Problem& problem, const Mask& mask) {
  if (!problem.packed()) {
    return resolve_mask(problem.operation, mask, {problem.query_len, problem.key_len});
  }
  if (problem.cu_seqlens_q->device() != Device{}) {
    invalid(problem, "cu_seqlens_q is on ", problem.cu_seqlens_q->device(),
            ", expected host memory: a structured mask depends on the lengths");
  }
  return resolve_packed_mask(problem.operation, mask, *problem.cu_seqlens_q, *problem.cu_seqlens_k);
}

// The parts of a mask in a problem, with the bools on the device of the other tensors.
struct HeldMask {
  std::shared_ptr<const ResolvedMask> resolved;
  Tensor bools;
};

}  // namespace

void take_mask(Problem& problem, const Mask& mask) {
  check_axis(problem, problem.packed() ? "batch items for sequences" : "batch items", mask.batch(), problem.batch);
  check_axis(problem, "heads", mask.heads(), problem.heads);
  auto held = std::make_shared<HeldMask>(HeldMask{resolved(problem, mask), {}});
  if (held->resolved->spans) {
    const Tensor& spans = *held->resolved->spans;  // in the normal form of spans.h
    problem.spans = spans.view().expand({problem.batch, problem.heads, spans.size(2), spans.size(3), 2});
    problem.span_rows = held->resolved->rows;
  }
  if (held->resolved->bools) {
    ConstTensorView bools = *held->resolved->bools;
    if (problem.query.device() != Device{}) {
      held->bools = copied_to(bools, problem.query.device(), problem.stream);
      bools = held->bools;
    }
    problem.mask = bools.expand({problem.batch, problem.heads, problem.query_len, problem.key_len});
  }
  problem.structured_mask = held;
}

}  // namespace headway
