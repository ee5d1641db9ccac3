// Sums over any number of terms that do not drift.
#pragma once

namespace headway::cuda {

// A sum that carries what rounding took from it. (The compiler is told not to fuse or reorder its steps: -fmad=false.)
template <class Real>
struct CompensatedSum {
  Real value = 0, lost = 0;

  __device__ __forceinline__ void add(Real added) {
    const Real term = added - lost, sum = value + term;
    const Real rounded = (sum - value) - term;
    lost = rounded == rounded ? rounded : Real(0);  // of infinite sums nothing is known
    value = sum;
  }

  __device__ __forceinline__ void multiply(Real factor) {
    value *= factor;
    lost *= factor;
  }
};

}  // namespace headway::cuda
