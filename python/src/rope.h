// RopeConfig from the settings that headway._rope has checked.
#pragma once

#include "errors.h"

namespace headway::python {

// A dict with the names of RopeConfig's fields, `scaling` as a word; None where a field is absent.
RopeConfig read_rope(const nb::dict& settings);

}  // namespace headway::python
