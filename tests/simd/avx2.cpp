#include "engines/cpu/simd/avx2.h"

#include "simd/checks.h"

namespace headway::cpu {

void check_avx2(const CheckReport& report) {
  static_assert(FloatVocabulary<F32> && DoubleVocabulary<F64>);
  Checks<F32>(report, true).run();
  Checks<F64>(report, true).run();
}

}  // namespace headway::cpu
