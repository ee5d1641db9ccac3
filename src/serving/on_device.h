// RoPE and a cache's appends on a CUDA device, queued on the caller's stream. Defined in the CUDA engine's folder or,
// in builds without it, in the folder that replaces it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "headway/rope.h"
#include "headway/tensor.h"

namespace headway {

// The rotation of rows: frequencies of the pairs, their layout in a row, and the attention factor.
struct DeviceRotation {
  const RopeFrequencies& frequencies;
  bool interleaved;
  bool back;  // by the opposite angles
};

// x and out [..., S, D] on one device, positions [S] or [B,S] there or in host memory: checked, and not empty.
void rope_on_device(const char* operation, const ConstTensorView& x, const ConstTensorView& positions,
                    const TensorView& out, const DeviceRotation& rotation, void* stream);

// New rows of one operand, [B,Hkv,S,W] or packed [total,Hkv,W]: row t in the order of the sequences goes to slots[t] of
// `pages` [pages, page_size, Hkv, W], with 8-bit pages to `scales` [pages, page_size, Hkv] too. With a rotation row t
// is rotated to positions[t]. A row with NaN or Inf cannot be stored in 8 bits. Since the host does not wait for the
// numbers, its scale becomes NaN, and so do the rows that attend to it.
struct DeviceAppend {
  ConstTensorView rows;
  bool packed;
  std::span<const std::int64_t> slots, positions;
  TensorView pages;
  std::optional<TensorView> scales;
  std::optional<DeviceRotation> rotation;
};
void append_on_device(const char* operation, const DeviceAppend& append, void* stream);

}  // namespace headway
