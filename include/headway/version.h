// The version of Headway: the one place that states it. The build and the Python package read it from here.
#pragma once

#include "headway/cxx20.h"

#define HEADWAY_VERSION "0.1.0"

namespace headway {
inline constexpr const char* version = HEADWAY_VERSION;
}
