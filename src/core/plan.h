// The part of a plan that is the same whichever engine runs it.
#pragma once

#include "core/problem.h"
#include "headway/plan.h"

namespace headway {

// Fills in the numbers. Running a call needs only these; for a tiny one, building the texts would take longer than the
// work.
Plan common_plan(const Problem& problem);

// Fills in the texts: shapes and options.
void describe_problem(const Problem& problem, Plan& plan);

}  // namespace headway
