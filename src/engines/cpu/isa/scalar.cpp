// The kernels for any machine.
#include "engines/cpu/simd/scalar.h"

#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

const Kernels& scalar_kernels() {
  static const Kernels kernels = make_kernels("scalar", scalar_f64_kernels());
  return kernels;
}

}  // namespace headway::cpu
