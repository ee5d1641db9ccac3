// Tensor maps: how the bulk copy engine of Hopper and later chips finds a [B,H,S,D] view or a [B,H,Sq,Sk] matrix.
#pragma once

#include <cuda.h>

#include <optional>
#include <string>
#include <string_view>

#include "headway/tensor.h"

namespace headway::cuda {

// Why the engine cannot read a view of a half type; nothing when it can.
std::optional<std::string> map_refusal(const char* name, const ConstTensorView& view);

// Boxes of 64 columns and `rows` rows of one head, swizzled over 128 bytes; zeros outside of the view. Axes that repeat
// one element (stride 0) have one entry.
CUtensorMap tensor_map(const ConstTensorView& view, int rows, std::string_view operation);

// The same for what is read once: memory is asked for no more than the boxes hold. (Twice the 128 bytes of a box's row
// at a time cost a tenth of the bandwidth.)
CUtensorMap stream_map(const ConstTensorView& view, int rows, std::string_view operation);

// A box of a mask or bias: `columns` of them are at most 128 bytes, which is also how far they are swizzled.
struct MatrixBox {
  int columns, rows;
};

// The same for a [B,H,Sq,Sk] matrix of bools, halves or f32.
bool is_mappable(const ConstTensorView& matrix);
CUtensorMap matrix_map(const ConstTensorView& matrix, MatrixBox box, std::string_view operation);

}  // namespace headway::cuda
