// Single elements of any type read and written as the number type that a kernel computes in.
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "engines/cuda/arguments.h"
#include "engines/cuda/ptx/convert.cuh"

namespace headway::cuda {

// What softmax statistics and sums are kept in.
template <class T>
using RealOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class Real>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float highest = FLT_MAX;
  static constexpr float lowest_score = -0x1.fffffcp127f;  // of finite ones: the number above -highest
};
template <>
struct Limits<double> {
  static constexpr double highest = DBL_MAX;
  static constexpr double lowest_score = -0x1.ffffffffffffep1023;
};

template <class Real>
__device__ inline Real infinity() {
  return static_cast<Real>(__int_as_float(0x7f800000));
}

template <class Real, class T>
__device__ inline Real number(T value) {
  if constexpr (std::is_same_v<T, bfloat16> || std::is_same_v<T, float16> || std::is_same_v<T, float8_e4m3>) {
    return static_cast<Real>(ptx::to_float(value));
  } else {
    return static_cast<Real>(value);
  }
}

template <class T, class Real>
__device__ inline T element(Real value) {
  if constexpr (std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>) {
    T result;
    ptx::convert(static_cast<float>(value), result);
    return result;
  } else {
    return static_cast<T>(value);
  }
}

// A finite number that the type cannot hold (a float64 bias of -1e300 in a f32 call) becomes the nearest that it can.
template <class Real>
__device__ inline Real bounded(double value) {
  if constexpr (std::is_same_v<Real, float>) {
    const bool beyond = fabs(value) > FLT_MAX && fabs(value) <= DBL_MAX;
    return beyond ? copysignf(FLT_MAX, static_cast<float>(value)) : static_cast<float>(value);
  } else {
    return value;
  }
}

template <class Real>
__device__ inline Real load_number(const void* data, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::f64: return bounded<Real>(static_cast<const double*>(data)[at]);
    case DType::bf16: return number<Real>(static_cast<const bfloat16*>(data)[at]);
    case DType::f16: return number<Real>(static_cast<const float16*>(data)[at]);
    default: return number<Real>(static_cast<const float*>(data)[at]);
  }
}

template <class Real>
__device__ inline void store_number(void* data, DType dtype, std::int64_t at, Real value) {
  switch (dtype) {
    case DType::f64: static_cast<double*>(data)[at] = value; break;
    case DType::bf16: static_cast<bfloat16*>(data)[at] = element<bfloat16>(value); break;
    case DType::f16: static_cast<float16*>(data)[at] = element<float16>(value); break;
    default: static_cast<float*>(data)[at] = static_cast<float>(value); break;
  }
}

template <class T>
__device__ inline T* head_of(const Rows& rows, std::int64_t b, std::int64_t h) {
  return static_cast<T*>(rows.data) + b * rows.batch + h * rows.head;
}

// visit(each number of a block, m * N + n) in a loop, on copies in local memory: for what is nearly never done, and
// must neither become code for every number nor take registers.
template <int M, int N, class Real, class Visit>
__device__ __forceinline__ void visit_in_loop(Real (&block)[M][N], const Visit& visit) {
  Real copies[M * N];
#pragma unroll
  for (int x = 0; x < M * N; ++x) {
    copies[x] = block[x / N][x % N];
  }
#pragma unroll 1
  for (int x = 0; x < M * N; ++x) {
    visit(copies[x], x);
  }
#pragma unroll
  for (int x = 0; x < M * N; ++x) {
    block[x / N][x % N] = copies[x];
  }
}

template <int M, int N, class Real>
__device__ inline bool holds_not_finite(const Real (&c)[M][N]) {
  bool any = false;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      any |= !(fabs(c[m][n]) <= Limits<Real>::highest);
    }
  }
  return any;
}

template <int M, int N, class Real>
__device__ inline bool holds_nan(const Real (&c)[M][N]) {
  bool nan = false;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      nan |= c[m][n] != c[m][n];
    }
  }
  return nan;
}

}  // namespace headway::cuda
