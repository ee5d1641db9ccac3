// What the tests of serving share: random tensors, and the text of an error.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "headway/headway.h"
#include "support/array.h"

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

template <class Error, class Action>
std::string error_text(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

}  // namespace headway::test
