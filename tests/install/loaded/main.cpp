// What a program is told of the CUDA engine in the library beside it.
#include <exception>
#include <iostream>

#include "core/device_memory.h"
#include "core/engine.h"

int main() {
  std::cout << headway::cuda_engine().unavailable().value_or("there") << '\n';
  try {
    headway::take_device_memory(8, {headway::DeviceType::cuda, 0}, nullptr);
  } catch (const std::exception& error) {
    std::cout << error.what() << '\n';
  }
}
