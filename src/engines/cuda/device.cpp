#include "engines/cuda/device.h"

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/text.h"
#include "engines/cuda/driver.h"
#include "engines/cuda/pretended_device.h"
#include "headway/error.h"

namespace headway::cuda {

void check(cudaError_t result, std::string_view operation, std::string_view what) {
  if (result == cudaSuccess) {
    return;
  }
  cudaGetLastError();  // so that the next call does not find this one's error
  const std::string message =
      text(operation, ": ", what, ": CUDA says ", cudaGetErrorName(result), ", ", cudaGetErrorString(result));
  if (result == cudaErrorMemoryAllocation) {
    throw OutOfMemory(message);
  }
  throw DeviceError(message);
}

namespace {

// The driver's side of the current device.
struct ContextFunctions {
  decltype(&cuDeviceGet) get = function<decltype(&cuDeviceGet)>("cuDeviceGet");
  decltype(&cuDevicePrimaryCtxRetain) retain =
      function<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain");
  decltype(&cuCtxPushCurrent) push = function<decltype(&cuCtxPushCurrent)>("cuCtxPushCurrent");
  decltype(&cuCtxPopCurrent) pop = function<decltype(&cuCtxPopCurrent)>("cuCtxPopCurrent");

  bool complete() const { return get != nullptr && retain != nullptr && push != nullptr && pop != nullptr; }

 private:
  template <class Function>
  static Function function(const char* name) {
    return reinterpret_cast<Function>(driver_function(name));
  }
};

const ContextFunctions& context_functions() {
  static const ContextFunctions functions;
  return functions;
}

// Retained once and never released, as the runtime does. Null on failure.
CUcontext primary_context(int device) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<int, CUcontext>& contexts = *new std::map<int, CUcontext>;
  const std::lock_guard lock(mutex);
  CUcontext& context = contexts[device];
  CUdevice handle = 0;
  if (context == nullptr && context_functions().complete() &&
      context_functions().get(&handle, device) == CUDA_SUCCESS &&
      context_functions().retain(&context, handle) != CUDA_SUCCESS) {
    context = nullptr;
  }
  return context;
}

constexpr int no_scope = -1;
thread_local int scope_device = no_scope;  // of the innermost DeviceScope that pushed a context

}  // namespace

int current_device() {
  int device = scope_device;
  if (device == no_scope && cudaGetDevice(&device) != cudaSuccess) {
    cudaGetLastError();
    device = 0;
  }
  return device;
}

namespace {

// A thread's current device has no context in it before the runtime's first call there, and the driver's own functions
// (cuTensorMapEncodeTiled) need one.
void begin_thread_on(int device) {
  static thread_local int begun = no_scope;
  if (begun != device) {
    if (cudaSetDevice(device) != cudaSuccess) {  // which it is already; the call's first use of the device says so too
      cudaGetLastError();
    }
    begun = device;
  }
}

}  // namespace

DeviceScope::DeviceScope(int device, std::string_view operation) : before_(scope_device) {
  if (current_device() == device) {
    if (scope_device == no_scope) {
      begin_thread_on(device);
    }
    return;
  }
  CUcontext context = primary_context(device);
  if (context == nullptr || context_functions().push(context) != CUDA_SUCCESS) {
    check(cudaErrorDeviceUninitialized, operation, text("making cuda:", device, " current"));
  }
  scope_device = device;
  pushed_ = true;
}

DeviceScope::~DeviceScope() {
  if (pushed_) {
    CUcontext popped = nullptr;
    context_functions().pop(&popped);
    scope_device = before_;
  }
}

namespace {
const DeviceProperties* pretended = nullptr;
}

PretendedDevice::PretendedDevice(const DeviceProperties& properties) : properties_(properties) {
  pretended = &properties_;
}

PretendedDevice::~PretendedDevice() { pretended = nullptr; }

int device_count() {
  if (pretended != nullptr) {
    return 1;
  }
  static const int count = [] {
    int found = 0;
    if (cudaGetDeviceCount(&found) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return found;
  }();
  return count;
}

const DeviceProperties& device_properties(int device) {
  if (pretended != nullptr) {
    return *pretended;
  }
  static const std::vector<DeviceProperties> all = [] {
    std::vector<DeviceProperties> list(static_cast<std::size_t>(device_count()));
    for (int d = 0; d < device_count(); ++d) {
      DeviceProperties& one = list[static_cast<std::size_t>(d)];
      cudaDeviceGetAttribute(&one.major, cudaDevAttrComputeCapabilityMajor, d);
      cudaDeviceGetAttribute(&one.minor, cudaDevAttrComputeCapabilityMinor, d);
      cudaDeviceGetAttribute(&one.multiprocessors, cudaDevAttrMultiProcessorCount, d);
      cudaDeviceGetAttribute(&one.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, d);
    }
    return list;
  }();
  return all[static_cast<std::size_t>(device)];
}

namespace {

// What a pool keeps when the device has been waited for: of tensors all, or every step of a training would take its
// memory from the system anew. Of workspace a 64th of the device's memory, which is enough for the gradients of large
// batches: to take hundreds of megabytes from the system takes a millisecond, and other libraries need memory too.
std::uint64_t kept_bytes(MemoryFor purpose, int device) {
  if (purpose == MemoryFor::tensors) {
    return ~std::uint64_t{0};
  }
  constexpr std::uint64_t least = std::uint64_t{256} << 20;
  const auto total = reinterpret_cast<decltype(&cuDeviceTotalMem)>(driver_function("cuDeviceTotalMem"));
  CUdevice handle = 0;
  std::size_t all = 0;
  const bool known = total != nullptr && context_functions().complete() &&
                     context_functions().get(&handle, device) == CUDA_SUCCESS && total(&all, handle) == CUDA_SUCCESS;
  return known ? std::max<std::uint64_t>(least, all / 64) : least;
}

// Two pools a device, never destroyed: a stream may still give memory back while the process ends.
struct Pools {
  cudaMemPool_t of[2] = {nullptr, nullptr};
};
Pools& pools_of(int device) {
  static std::vector<Pools>& all = *new std::vector<Pools>(static_cast<std::size_t>(device_count()));
  return all[static_cast<std::size_t>(device)];
}

std::mutex& pool_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

std::atomic<bool> any_pool{false};

// Blocks that the last calls on a few streams used as workspace, for the next ones there: to ask the driver for memory
// and give it back takes microseconds, which is what a small call takes in all. A block belongs to one call at a time,
// and calls of one stream are ordered by it, so it needs no synchronisation. A number names a stream for good, unlike
// its handle, which a new stream may get while the old one's work still runs. What is captured into a graph never has
// one: the graph may run on any stream.
class KeptBlocks {
 public:
  static constexpr std::size_t largest = std::size_t{16} << 20;

  struct Block {
    std::uint64_t stream_number = 0;
    int device = 0;
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
  };

  // A block of the stream with so many bytes, or one without memory.
  Block take(std::uint64_t stream_number, int device, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (Block& one : blocks_) {
      if (one.memory != nullptr && one.stream_number == stream_number && one.device == device && one.bytes >= bytes) {
        return std::exchange(one, {});
      }
    }
    return {};
  }

  // Keeps a block, and returns what has to be freed instead: a smaller one of the same stream, or the block itself
  // where all places are taken by other streams.
  Block keep(const Block& block) {
    const std::lock_guard lock(mutex_);
    for (Block& one : blocks_) {
      if (one.memory != nullptr && one.stream_number == block.stream_number && one.device == block.device &&
          one.bytes < block.bytes) {
        return std::exchange(one, block);
      }
    }
    for (Block& one : blocks_) {
      if (one.memory == nullptr) {
        return std::exchange(one, block);
      }
    }
    return block;
  }

  bool has_any(int device) {
    const std::lock_guard lock(mutex_);
    return std::any_of(std::begin(blocks_), std::end(blocks_),
                       [&](const Block& one) { return one.memory != nullptr && one.device == device; });
  }

  // Takes out a block of the device and, unless it is 0, of this stream; one without memory when there is none.
  Block remove(int device, std::uint64_t stream_number) {
    const std::lock_guard lock(mutex_);
    for (Block& one : blocks_) {
      if (one.memory != nullptr && one.device == device && (stream_number == 0 || one.stream_number == stream_number)) {
        return std::exchange(one, {});
      }
    }
    return {};
  }

 private:
  std::mutex mutex_;
  Block blocks_[8];
};

KeptBlocks& kept_blocks() {
  static KeptBlocks& blocks = *new KeptBlocks;
  return blocks;
}

// The stream's number for good, or 0 where blocks may not be kept for it: it is captured, or cannot be asked.
std::uint64_t number_of(cudaStream_t stream) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  if (cudaStreamIsCapturing(stream, &capturing) != cudaSuccess || capturing != cudaStreamCaptureStatusNone ||
      cudaStreamGetId(stream, &number) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return number + 1;
}

cudaMemPool_t pool(int device, MemoryFor purpose, std::string_view operation) {
  const std::lock_guard lock(pool_mutex());
  cudaMemPool_t& one = pools_of(device).of[static_cast<int>(purpose)];
  if (one == nullptr) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, device};
    cudaMemPool_t made = nullptr;
    check(cudaMemPoolCreate(&made, &properties), operation, "creating a memory pool");
    std::uint64_t keep = kept_bytes(purpose, device);
    check(cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &keep), operation, "setting up a memory pool");
    one = made;
    any_pool.store(true, std::memory_order_release);
  }
  return one;
}

// Gives the system what both pools keep and nobody uses; false where that cannot be waited for.
bool release_kept(int device, cudaStream_t stream) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &capturing) != cudaSuccess || capturing != cudaStreamCaptureStatusNone ||
      cudaStreamSynchronize(stream) != cudaSuccess) {
    return false;
  }
  const std::uint64_t number = number_of(stream);
  while (std::byte* memory = number == 0 ? nullptr : kept_blocks().remove(device, number).memory) {
    cudaFreeAsync(memory, stream);
  }
  cudaStreamSynchronize(stream);
  const std::lock_guard lock(pool_mutex());
  for (cudaMemPool_t one : pools_of(device).of) {
    if (one != nullptr) {
      cudaMemPoolTrimTo(one, 0);
    }
  }
  return true;
}

// Frees the blocks that streams of a device have left behind, whatever has become of the streams. Where the device
// cannot be waited for, because something is captured, they stay.
void release_blocks(int device) {
  const DeviceScope scope(device, "release_memory");
  if (cudaDeviceSynchronize() != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  while (std::byte* memory = kept_blocks().remove(device, 0).memory) {
    cudaFreeAsync(memory, nullptr);
  }
  cudaStreamSynchronize(nullptr);
}

}  // namespace

std::int64_t release_pools() {
  if (!any_pool.load(std::memory_order_acquire)) {  // without asking CUDA, which may not have begun in this process
    return 0;
  }
  for (int device = 0; device < device_count(); ++device) {
    if (kept_blocks().has_any(device)) {
      release_blocks(device);
    }
  }
  const std::lock_guard lock(pool_mutex());
  std::int64_t bytes = 0;
  for (int device = 0; device < device_count(); ++device) {
    for (cudaMemPool_t one : pools_of(device).of) {
      const auto held = [&] {
        std::uint64_t value = 0;
        return one != nullptr && cudaMemPoolGetAttribute(one, cudaMemPoolAttrReservedMemCurrent, &value) == cudaSuccess
                   ? static_cast<std::int64_t>(value)
                   : 0;
      };
      const std::int64_t before = held();
      if (one != nullptr && cudaMemPoolTrimTo(one, 0) == cudaSuccess) {
        bytes += before - held();
      }
    }
  }
  return bytes;
}

void* take_from_pool(std::size_t bytes, int device, cudaStream_t stream, std::string_view operation,
                     MemoryFor purpose) {
  void* memory = nullptr;
  if (bytes == 0) {
    return memory;
  }
  cudaMemPool_t from = pool(device, purpose, operation);
  cudaError_t result = cudaMallocFromPoolAsync(&memory, bytes, from, stream);
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    if (release_kept(device, stream)) {
      result = cudaMallocFromPoolAsync(&memory, bytes, from, stream);
    }
  }
  check(result, operation,
        text("allocating ", bytes, " bytes for ", purpose == MemoryFor::workspace ? "workspace" : "a tensor",
             " on cuda:", device));
  return memory;
}

Workspace::Workspace(std::size_t bytes, int device, cudaStream_t stream, std::string_view operation)
    : stream_(stream), device_(device), bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  if (bytes <= KeptBlocks::largest) {
    stream_number_ = number_of(stream);
  }
  if (stream_number_ != 0) {
    bytes_ = std::bit_ceil(std::max(bytes, std::size_t{1} << 16));  // that the next call may be a little larger
    const KeptBlocks::Block kept = kept_blocks().take(stream_number_, device, bytes);
    if (kept.memory != nullptr) {
      memory_ = kept.memory;
      bytes_ = kept.bytes;
      return;
    }
  }
  memory_ = static_cast<std::byte*>(take_from_pool(bytes_, device, stream, operation, MemoryFor::workspace));
}

Workspace::~Workspace() {
  std::byte* freed = memory_;
  if (memory_ != nullptr && stream_number_ != 0) {
    freed = kept_blocks().keep({stream_number_, device_, memory_, bytes_}).memory;
  }
  if (freed != nullptr) {
    cudaFreeAsync(freed, stream_);
  }
}

void* Workspace::take(std::size_t bytes) {
  void* piece = memory_ + used_;
  used_ += rounded(bytes);
  return piece;
}

namespace {

// What the runtime was asked about a kernel on a device: asking takes microseconds, and every call would.
struct KernelState {
  KernelResources resources;
  std::size_t allowed_shared = 0;  // of dynamic shared memory; what a kernel may have unasked includes its static part
};

KernelState& kernel_state(const void* kernel) {
  static std::map<std::pair<const void*, int>, KernelState>& states =
      *new std::map<std::pair<const void*, int>, KernelState>;
  return states[{kernel, current_device()}];
}

std::mutex& kernel_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

}  // namespace

KernelResources kernel_resources(const void* kernel) {
  const std::lock_guard lock(kernel_mutex());
  KernelResources& known = kernel_state(kernel).resources;
  if (known.registers == 0) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
      cudaGetLastError();
      return {};
    }
    known = {attributes.numRegs, static_cast<int>(attributes.sharedSizeBytes)};
  }
  return known;
}

void allow_shared(const void* kernel, std::size_t bytes, std::string_view operation) {
  const std::lock_guard lock(kernel_mutex());
  std::size_t& allowed = kernel_state(kernel).allowed_shared;
  if (bytes > allowed) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), operation,
          text("asking for ", bytes, " bytes of shared memory"));
    allowed = bytes;
  }
}

}  // namespace headway::cuda
