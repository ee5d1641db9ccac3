// Marks what a shared libheadway shows to its own engine libraries (engines/cuda_loaded) beside the public headers.
#pragma once

#define HEADWAY_SHOWN __attribute__((visibility("default")))
