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

  // Whether calls share one block of device memory, which a thread keeps: two copies a call instead of several for each
  // tensor. Without it every tensor has an allocation of its own, which compute-sanitizer knows the end of.
  static void share_one_block(bool shared);

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
    std::byte* memory = nullptr;  // its margin, on the device
    std::byte* data = nullptr;    // where begin lies there

    std::size_t bytes() const { return static_cast<std::size_t>(end - begin); }
    std::size_t bytes_before() const;  // from memory to data
  };

  void find_regions();
  void place_apart();
  void place_in_block();
  void collect_apart();
  void collect_from_block();
  template <class View>
  void move(View& view) const;

  std::vector<ConstTensorView*> inputs_;
  std::vector<TensorView*> outputs_;
  std::vector<Region> regions_;
  bool in_block_ = false;
};

}  // namespace headway::test
