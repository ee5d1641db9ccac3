// The kernels for AVX-512 with bf16 dot products and VBMI: those of AVX-512, but for bf16.
#include "engines/cpu/simd/avx512_bf16.h"

#include "engines/cpu/gemm/pairs.h"
#include "engines/cpu/kernel/backward_pairs.h"
#include "engines/cpu/kernel/decode_pairs.h"
#include "engines/cpu/kernel/forward_pairs.h"
#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {
namespace {

static_assert(FloatVocabulary<BF16> && PairOperands<Operands<BF16>, BF16>);

Kernels with_dot_products() {
  Kernels kernels = avx512_kernels();
  kernels.name = "avx512_bf16";
  constexpr auto bf16 = static_cast<int>(Storage::bf16);
  kernels.forward[bf16] = forward_pairs_kernel<BF16, F32>();
  kernels.decode[bf16] = decode_pairs_kernel<BF16, F32, bfloat16>(kernels.decode[bf16]);
  kernels.scaled_decode[0][bf16] = decode_pairs_kernel<BF16, F32, int8>(kernels.scaled_decode[0][bf16]);
  kernels.scaled_decode[1][bf16] = decode_pairs_kernel<BF16, F32, float8>(kernels.scaled_decode[1][bf16]);
  kernels.backward[bf16] = backward_pairs_kernel<BF16, F32>();
  kernels.gemm[bf16] = gemm_pairs_kernel<BF16, F32>();
  return kernels;
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = with_dot_products();
  return kernels;
}

}  // namespace headway::cpu
