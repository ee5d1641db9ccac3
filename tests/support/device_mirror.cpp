#include "support/device_mirror.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace headway::test {
namespace {

constexpr std::size_t margin = 256;
constexpr int untouched = 0xFF;

void check(cudaError_t result) {
  if (result != cudaSuccess)
    throw std::runtime_error(std::string("the test's own CUDA: ") + cudaGetErrorString(result));
}

// The bytes from a view's lowest element to its highest, relative to its data pointer.
struct Extent {
  std::int64_t begin = 0, end = 0;
};

Extent extent(ConstTensorView view) {
  std::int64_t lowest = 0, highest = 0;
  for (int axis = 0; axis < view.rank(); ++axis) {
    if (view.size(axis) == 0) return {};
    const std::int64_t last = (view.size(axis) - 1) * view.stride(axis);
    (last < 0 ? lowest : highest) += last;
  }
  const auto element = static_cast<std::int64_t>(size_of(view.dtype()));
  return {lowest * element, (highest + 1) * element};
}

bool share_block = false;

// Memory on the device and as much on the host, for copies in one piece. One call of a thread uses it at a time.
class Block {
 public:
  void reserve(std::size_t bytes) {
    if (bytes <= size_) return;
    size_ = 2 * bytes;
    cudaFree(device);
    cudaFreeHost(host);
    check(cudaMalloc(reinterpret_cast<void**>(&device), size_));
    check(cudaMallocHost(reinterpret_cast<void**>(&host), size_));
  }

  std::byte *device = nullptr, *host = nullptr;
  std::size_t used = 0;

 private:
  std::size_t size_ = 0;
};

Block& block() {
  thread_local Block one;  // the process's end gives it back
  return one;
}

bool is_untouched(const std::byte* begin, const std::byte* end) {
  return std::all_of(begin, end, [](std::byte byte) { return byte == std::byte{untouched}; });
}

constexpr const char* margin_written = "memory beside a tensor was written on the device";

}  // namespace

void DeviceMirror::share_one_block(bool shared) { share_block = shared; }

// Aligned as in host memory: allocations are aligned to 256 bytes.
std::size_t DeviceMirror::Region::bytes_before() const {
  return margin + reinterpret_cast<std::uintptr_t>(begin) % 256;
}

DeviceMirror::~DeviceMirror() {
  if (in_block_) return;
  for (const Region& region : regions_) cudaFree(region.memory);
}

void DeviceMirror::find_regions() {
  const auto add_region = [&](ConstTensorView view, bool written) {
    const Extent covered = extent(view);
    auto* data = static_cast<std::byte*>(const_cast<void*>(view.data()));
    if (covered.begin < covered.end) regions_.push_back({data + covered.begin, data + covered.end, written});
  };
  for (const ConstTensorView* view : inputs_) add_region(*view, false);
  for (const TensorView* view : outputs_) add_region(*view, true);
  std::sort(regions_.begin(), regions_.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
  std::vector<Region> merged;
  for (const Region& region : regions_) {
    if (!merged.empty() && region.begin <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, region.end);
      merged.back().written |= region.written;
    } else {
      merged.push_back(region);
    }
  }
  regions_ = std::move(merged);
}

void DeviceMirror::place() {
  find_regions();
  in_block_ = share_block;
  in_block_ ? place_in_block() : place_apart();
  for (ConstTensorView* view : inputs_) move(*view);
  for (TensorView* view : outputs_) move(*view);
}

void DeviceMirror::place_apart() {
  for (Region& region : regions_) {
    const std::size_t before = region.bytes_before();
    void* memory = nullptr;
    check(cudaMalloc(&memory, before + region.bytes() + margin));
    region.memory = static_cast<std::byte*>(memory);
    region.data = region.memory + before;
    check(cudaMemset(region.memory, untouched, before));
    check(cudaMemset(region.data + region.bytes(), untouched, margin));
    check(cudaMemcpy(region.data, region.begin, region.bytes(), cudaMemcpyHostToDevice));
  }
}

void DeviceMirror::place_in_block() {
  std::size_t size = 0;
  for (const Region& region : regions_) size += (region.bytes_before() + region.bytes() + margin + 255) / 256 * 256;
  Block& memory = block();
  memory.reserve(size);
  memory.used = size;
  std::memset(memory.host, untouched, size);
  std::size_t at = 0;
  for (Region& region : regions_) {
    region.memory = memory.device + at;
    region.data = region.memory + region.bytes_before();
    std::memcpy(memory.host + (region.data - memory.device), region.begin, region.bytes());
    at += (region.bytes_before() + region.bytes() + margin + 255) / 256 * 256;
  }
  check(cudaMemcpy(memory.device, memory.host, size, cudaMemcpyHostToDevice));
}

template <class View>
void DeviceMirror::move(View& view) const {
  const Device device{DeviceType::cuda, 0};
  auto* data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(view.data())));
  std::byte* there = nullptr;
  const Extent covered = extent(view);
  for (const Region& region : regions_)
    if (covered.begin < covered.end && data + covered.begin >= region.begin && data + covered.end <= region.end)
      there = region.data + (data - region.begin);
  view = View(there, view.dtype(), view.sizes(), view.strides(), device);
}

void DeviceMirror::collect() {
  check(cudaDeviceSynchronize());
  in_block_ ? collect_from_block() : collect_apart();
}

void DeviceMirror::collect_apart() {
  for (const Region& region : regions_) {
    if (region.written) check(cudaMemcpy(region.begin, region.data, region.bytes(), cudaMemcpyDeviceToHost));
    std::vector<std::byte> margins(region.bytes_before() + margin);
    check(cudaMemcpy(margins.data(), region.memory, region.bytes_before(), cudaMemcpyDeviceToHost));
    check(cudaMemcpy(margins.data() + region.bytes_before(), region.data + region.bytes(), margin,
                     cudaMemcpyDeviceToHost));
    EXPECT_TRUE(is_untouched(margins.data(), margins.data() + margins.size())) << margin_written;
  }
}

void DeviceMirror::collect_from_block() {
  Block& memory = block();
  check(cudaMemcpy(memory.host, memory.device, memory.used, cudaMemcpyDeviceToHost));
  const std::byte* margin_begin = memory.host;
  for (const Region& region : regions_) {
    const std::byte* data = memory.host + (region.data - memory.device);
    EXPECT_TRUE(is_untouched(margin_begin, data)) << margin_written;
    if (region.written) std::memcpy(region.begin, data, region.bytes());
    margin_begin = data + region.bytes();
  }
  EXPECT_TRUE(is_untouched(margin_begin, memory.host + memory.used)) << margin_written;
}

}  // namespace headway::test
