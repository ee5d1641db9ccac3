// Device memory of one test, and copies of tensors in it.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <utility>

#include "headway/tensor.h"

namespace headway::test {

// Null where there is too little.
class Memory {
 public:
  explicit Memory(std::size_t bytes) {
    if (cudaMalloc(&data_, bytes) != cudaSuccess) {
      cudaGetLastError();
      data_ = nullptr;
    }
  }
  ~Memory() { cudaFree(data_); }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Memory& operator=(Memory&&) = delete;
  void* get() const { return data_; }
  TensorView view(DType dtype, const Dims& sizes) const { return {data_, dtype, sizes, Device{DeviceType::cuda, 0}}; }

 private:
  void* data_ = nullptr;
};

inline Memory copied(const Tensor& tensor) {
  const std::size_t bytes = static_cast<std::size_t>(tensor.elements()) * size_of(tensor.dtype());
  Memory memory(bytes);
  EXPECT_EQ(cudaMemcpy(memory.get(), tensor.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
  return memory;
}

inline Tensor fetched(const Memory& memory, const Dims& sizes, DType dtype) {
  Tensor tensor(sizes, dtype);
  const std::size_t bytes = static_cast<std::size_t>(tensor.elements()) * size_of(dtype);
  EXPECT_EQ(cudaMemcpy(tensor.data(), memory.get(), bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  return tensor;
}

}  // namespace headway::test
