// Cutting a task's scratch into arrays, each on its own cache lines. With a null base only `used` means anything: that
// is how a task's need is found.
#pragma once

#include <cstdint>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

template <class Scalar>
struct Scratch {
  Scalar* base;
  std::int64_t used = 0;  // in Scalars

  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t at = used;
    used += (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * (64 / static_cast<std::int64_t>(sizeof(Scalar)));
    return base == nullptr ? nullptr : reinterpret_cast<T*>(base + at);
  }
};

}  // namespace
}  // namespace headway::cpu
