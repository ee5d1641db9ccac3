// Marks functions that a shared libheadway exports to its engine libraries (engines/cuda_loaded), besides the public
// API.
#pragma once

#define HEADWAY_SHOWN __attribute__((visibility("default")))
