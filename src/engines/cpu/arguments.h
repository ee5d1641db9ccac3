// From a Problem to the plain data that kernels take.
#pragma once

#include "core/key_range.h"
#include "core/problem.h"
#include "engines/cpu/kernel/args.h"

namespace headway::cpu {

Storage storage_of(DType dtype);
RangeRule range_rule(const Problem& problem, const Sequence& sequence, std::int64_t b);

// Everything about head h of batch item b but the rows to do.
ForwardArgs forward_args(const ForwardProblem& problem, std::int64_t b, std::int64_t h);

}  // namespace headway::cpu
