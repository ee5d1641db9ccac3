// Copies of a call's tensors in a device's memory. Tests make and read tensors in host memory; for an engine that
// computes elsewhere, each region of memory that the call's views cover is copied there and back, gaps and all.
#pragma once

#include <cstddef>
#include <vector>

#include "headway/tensor.h"

namespace headway::test {

class DeviceMirror {
 public:
  DeviceMirror() = default;
  ~DeviceMirror();
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  // The views to move; they are changed in place by place().
  void add(ConstTensorView& view) { inputs_.push_back(&view); }
  void add(TensorView& view) { outputs_.push_back(&view); }

  // Copies every region to the device, between margins of known bytes, and points the views there.
  void place();
  // Waits for the device, copies back what may have been written, and fails the test if a margin has changed.
  void collect();

 private:
  struct Region {
    std::byte *begin, *end;  // in host memory
    bool written;
    std::byte* memory = nullptr;  // the allocation
    std::byte* data = nullptr;    // where begin lies in it
  };

  template <class View>
  void move(View& view) const;

  std::vector<ConstTensorView*> inputs_;
  std::vector<TensorView*> outputs_;
  std::vector<Region> regions_;
};

}  // namespace headway::test
