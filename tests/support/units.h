// The units in which errors of the element types are counted.
#pragma once

#include "headway/dtype.h"
#include "support/array.h"

namespace headway::test {

// The distance of a type's smallest numbers; a unit of the arithmetic that an engine computes in; and what storing a
// number in a half type costs on top of f32's arithmetic.
inline Real quantum_of(DType type) {
  switch (type) {
    case DType::f64: return 0x1p-1074L;
    case DType::f16: return 0x1p-24L;
    case DType::bf16: return 0x1p-133L;
    default: return 0x1p-149L;
  }
}
inline Real unit_of(DType type) { return type == DType::f64 ? 0x1p-53L : 0x1p-24L; }
inline Real half_unit_of(DType type) { return type == DType::f16 ? 0x1p-11L : type == DType::bf16 ? 0x1p-8L : 0; }

}  // namespace headway::test
