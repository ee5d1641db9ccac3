// Few queries against many keys: which sequences the decode kernel takes, how their keys are cut into chunks, and
// running them.
#pragma once

#include "core/key_range.h"
#include "core/problem.h"
#include "headway/plan.h"

namespace headway::cpu {

// Whether the decode kernel takes a sequence of these lengths. The kernels round differently, so this depends only on
// the sequence's own lengths, its type and the kind of call, not on the batch, strides, threads or outputs. For a pack
// it is decided for each sequence, so that a sequence has the same bits in any pack and alone.
bool is_decoded(const Problem& problem, std::int64_t queries, std::int64_t keys);

// Whether any sequence is, and whether all are.
struct Decoded {
  bool some, all;
};
Decoded decoded_sequences(const Problem& problem);

void describe_decode(const Problem& problem, Plan& plan);

// Runs the sequences that the decode kernel takes, and skips the others.
void decode(const ForwardProblem& problem);

}  // namespace headway::cpu
