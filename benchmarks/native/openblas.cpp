#include <cblas.h>

#include "native.h"

extern "C" int openblas_product(const float* x, const float* weight, float* y, std::int64_t rows, std::int64_t inputs,
                                std::int64_t outputs) {
  const auto m = static_cast<int>(rows), k = static_cast<int>(inputs), n = static_cast<int>(outputs);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, n, k, 1.0f, x, k, weight, n, 0.0f, y, n);
  return 1;
}
