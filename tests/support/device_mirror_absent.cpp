// In a build without CUDA no engine computes outside host memory.
#include <stdexcept>

#include "support/device_mirror.h"

namespace headway::test {

DeviceMirror::~DeviceMirror() = default;
void DeviceMirror::share_one_block(bool) {}
void DeviceMirror::place() { throw std::logic_error("this build has no engine for device memory"); }
void DeviceMirror::collect() {}

}  // namespace headway::test
