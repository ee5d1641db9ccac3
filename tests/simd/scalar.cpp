#include "engines/cpu/simd/scalar.h"

#include "simd/checks.h"

namespace headway::cpu {

void check_scalar(const CheckReport& report) {
  static_assert(FloatVocabulary<F32> && DoubleVocabulary<F64>);
  Checks<F32>(report, false).run();
  Checks<F64>(report, false).run();
}

}  // namespace headway::cpu
