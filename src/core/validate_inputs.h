// The first half of validation: inputs and options.
#pragma once

#include "core/checks.h"
#include "core/validate.h"

namespace headway {

// Checks the call's inputs and options and fills in all of the problem but its outputs.
Layout resolve(Problem& problem, const Call& call, Pass pass);

}  // namespace headway
