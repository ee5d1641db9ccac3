// What the tests of serving share: random tensors.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "headway/headway.h"
#include "support/array.h"
#include "support/error_text.h"

namespace headway::test {

inline Tensor random_tensor(const Dims& sizes, DType dtype, unsigned seed) {
  Tensor numbers(sizes, DType::f64);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  for (std::int64_t i = 0; i < numbers.elements(); ++i) {
    numbers.as<double>()[i] = normal(random);
  }
  return convert(numbers, dtype);
}

}  // namespace headway::test
