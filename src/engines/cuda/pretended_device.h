// For tests: what the engine would choose on a device that this machine may not have.
#pragma once

#include "engines/cuda/device.h"

namespace headway::cuda {

// While it lives, cuda:0 is said to have these properties. Calls still run on the device that there is, so one with
// fewer limits runs what another would; without any, calls can be planned and not run. Not for several threads.
class PretendedDevice {
 public:
  explicit PretendedDevice(const DeviceProperties& properties);
  ~PretendedDevice();
  PretendedDevice(const PretendedDevice&) = delete;
  PretendedDevice& operator=(const PretendedDevice&) = delete;

 private:
  DeviceProperties properties_;
};

}  // namespace headway::cuda
