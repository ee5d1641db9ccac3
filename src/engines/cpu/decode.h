// Few queries against many keys: which sequences the decode kernel takes, how their keys are cut into chunks, and
// running them.
#pragma once

#include "core/key_range.h"
#include "core/problem.h"
#include "headway/plan.h"

namespace headway::cpu {

// Whether a sequence of these lengths is decoded. The kernels round differently, so this asks about nothing but the
// sequence's own lengths, its type and the kind of call: not about the batch, strides, threads or outputs. Sequences of
// a pack choose one by one, so that a sequence has the same bits in any pack and alone.
bool is_decoded(const Problem& problem, std::int64_t queries, std::int64_t keys);

// Whether any sequence is, and whether all are.
struct Decoded {
  bool some, all;
};
Decoded decoded_sequences(const Problem& problem);

void describe_decode(const Problem& problem, Plan& plan);

// The sequences that are decoded; others are left alone.
void decode(const ForwardProblem& problem);

}  // namespace headway::cpu
