// Writing numbers of the compute type, or sums in double, as any storage type.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// Calls body with a null pointer of the storage's type.
template <class Body>
HEADWAY_INLINE void with_storage(Storage storage, const Body& body) {
  switch (storage) {
    case Storage::f32: body(static_cast<float*>(nullptr)); break;
    case Storage::f64: body(static_cast<double*>(nullptr)); break;
    case Storage::bf16: body(static_cast<bfloat16*>(nullptr)); break;
    case Storage::f16: body(static_cast<float16*>(nullptr)); break;
  }
}

HEADWAY_INLINE std::int64_t storage_size(Storage storage) {
  return storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2;
}

// to[c * stride] = from[c], rounded to Out; halves are rounded from float. -0 becomes 0, as in a sum
// that begins with 0: whether a number is summed may depend on the other sequences of a pack.
template <class Out, class Number>
HEADWAY_INLINE void store_row_as(Out* to, std::int64_t stride, const Number* from, std::int64_t count) {
  if constexpr (std::is_same_v<Out, float> || std::is_same_v<Out, double>) {
    for (std::int64_t c = 0; c < count; ++c) {
      to[c * stride] = static_cast<Out>(from[c] + 0);
    }
  } else {
    for (std::int64_t c = 0; c < count; c += F32::lanes) {
      alignas(64) float rounded[F32::lanes] = {};
      const int some = at_most(count - c, F32::lanes);
      for (int l = 0; l < some; ++l) {
        rounded[l] = static_cast<float>(from[c + l] + 0);
      }
      store_row<F32>(to, stride, c, some, F32::load(rounded));
    }
  }
}

// matrix(row + r, column + c) = numbers[r * ld + c]
template <class Number>
HEADWAY_NOINLINE void store_as(const WritableMatrix& matrix, Storage storage, std::int64_t row, std::int64_t rows,
                               std::int64_t column, std::int64_t columns, const Number* numbers, std::int64_t ld) {
  with_storage(storage, [&]<class Out>(Out*) {
    Out* first = static_cast<Out*>(matrix.data) + row * matrix.row_stride + column * matrix.column_stride;
    for (std::int64_t r = 0; r < rows; ++r) {
      store_row_as(first + r * matrix.row_stride, matrix.column_stride, numbers + r * ld, columns);
    }
  });
}

}  // namespace
}  // namespace headway::cpu
