// Functions of the CUDA driver, looked up in the one that is loaded, so that the library links without a driver.
#pragma once

namespace headway::cuda {

// As of CUDA 12.0; null where the driver has no such function.
void* driver_function(const char* name);

}  // namespace headway::cuda
