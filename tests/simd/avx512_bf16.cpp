#include "engines/cpu/simd/avx512_bf16.h"

#include "simd/checks.h"
#include "simd/pair_checks.h"

namespace headway::cpu {

void check_avx512_bf16(const CheckReport& report) { PairChecks<BF16>(report).run(); }

}  // namespace headway::cpu
