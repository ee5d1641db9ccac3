// The part of a plan that is the same whichever engine runs it.
#pragma once

#include "core/problem.h"
#include "headway/plan.h"

namespace headway {

// The numbers. A call needs no more: for a tiny one the words would take longer than the work.
Plan common_plan(const Problem& problem);

// The words: shapes and options.
void describe_problem(const Problem& problem, Plan& plan);

}  // namespace headway
