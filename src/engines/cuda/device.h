// The host side's dealings with the CUDA runtime: errors with its own words, the current device put back, properties
// read once, workspace that lives in stream order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "headway/tensor.h"

namespace headway::cuda {

// Throws OutOfMemory or DeviceError: "attention: launching mma_forward: CUDA says ...".
void check(cudaError_t result, std::string_view operation, std::string_view what);

// Makes a device current for a scope, by pushing its primary context: what is popped at the end leaves the thread as it
// was. (To set a device back would create a context on it, if there was none.)
class DeviceScope {
 public:
  DeviceScope(int device, std::string_view operation);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_;
  bool pushed_ = false;
};

int current_device();

struct DeviceProperties {
  int major = 0, minor = 0;
  int multiprocessors = 0;
  int shared_bytes = 0;  // the most that one block may ask for
};

int device_count();  // 0 without a driver or a device
const DeviceProperties& device_properties(int device);

// Device memory in stream order, from a pool of the library's own; null for no bytes. cudaFreeAsync gives it back.
enum class MemoryFor : std::uint8_t { workspace, tensors };
void* take_from_pool(std::size_t bytes, int device, cudaStream_t stream, std::string_view operation, MemoryFor purpose);

// Gives the system what the pools of all devices hold and nobody uses; how many bytes.
std::int64_t release_pools();

// The same for a scope: a block that an earlier scope of the stream left behind, else one from a pool of the library's
// own that keeps what it has, given back on the stream when the scope ends. No synchronisation, and legal while a
// stream is captured into a graph.
class Workspace {
 public:
  Workspace(std::size_t bytes, int device, cudaStream_t stream, std::string_view operation);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return memory_; }
  // The next piece, 256-byte aligned. The pieces must fit into what was asked for, each rounded up to 256.
  void* take(std::size_t bytes);
  template <class T>
  T* take_as(std::size_t count) {
    return static_cast<T*>(take(count * sizeof(T)));
  }
  static std::size_t rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

 private:
  cudaStream_t stream_;
  int device_;
  std::uint64_t stream_number_ = 0;  // where the block may serve the stream's next scope; else 0
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;  // of the block
  std::size_t used_ = 0;
};

// What a kernel was compiled to, for plans.
struct KernelResources {
  int registers = 0;
  int static_shared = 0;
};
KernelResources kernel_resources(const void* kernel);

// Lets a kernel have this much dynamic shared memory on the current device.
void allow_shared(const void* kernel, std::size_t bytes, std::string_view operation);

}  // namespace headway::cuda
