// The part of a plan that is the same whichever engine runs it.
#pragma once

#include "core/problem.h"
#include "headway/plan.h"

namespace headway {

Plan common_plan(const Problem& problem);

}  // namespace headway
