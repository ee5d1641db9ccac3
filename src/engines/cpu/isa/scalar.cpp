// The kernels for any machine.
#include "engines/cpu/simd/scalar.h"

#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

const Kernels& scalar_kernels() {
  static constexpr Kernels kernels = make_kernels("scalar");
  return kernels;
}

}  // namespace headway::cpu
