#include "support/device_mirror.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
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

}  // namespace

DeviceMirror::~DeviceMirror() {
  for (const Region& region : regions_) cudaFree(region.memory);
}

void DeviceMirror::place() {
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
  for (Region& region : regions_) {
    const auto bytes = static_cast<std::size_t>(region.end - region.begin);
    // Aligned as in host memory: cudaMalloc's own blocks are aligned to 256 bytes.
    const std::size_t before = margin + reinterpret_cast<std::uintptr_t>(region.begin) % 256;
    void* memory = nullptr;
    check(cudaMalloc(&memory, before + bytes + margin));
    region.memory = static_cast<std::byte*>(memory);
    region.data = region.memory + before;
    check(cudaMemset(region.memory, untouched, before));
    check(cudaMemset(region.data + bytes, untouched, margin));
    check(cudaMemcpy(region.data, region.begin, bytes, cudaMemcpyHostToDevice));
  }
  for (ConstTensorView* view : inputs_) move(*view);
  for (TensorView* view : outputs_) move(*view);
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
  for (const Region& region : regions_) {
    const auto bytes = static_cast<std::size_t>(region.end - region.begin);
    if (region.written) check(cudaMemcpy(region.begin, region.data, bytes, cudaMemcpyDeviceToHost));
    std::vector<unsigned char> margins(static_cast<std::size_t>(region.data - region.memory) + margin);
    const std::size_t before = margins.size() - margin;
    check(cudaMemcpy(margins.data(), region.memory, before, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(margins.data() + before, region.data + bytes, margin, cudaMemcpyDeviceToHost));
    EXPECT_TRUE(std::all_of(margins.begin(), margins.end(), [](unsigned char byte) { return byte == untouched; }))
        << "memory beside a tensor was written on the device";
  }
}

}  // namespace headway::test
