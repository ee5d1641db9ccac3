// A structured mask's place in a Problem.
#pragma once

#include "core/problem.h"

namespace headway {

// Makes the mask's spans and bools those of the problem, whose sizes are known by then. The problem keeps their memory.
void take_mask(Problem& problem, const Mask& mask);

}  // namespace headway
