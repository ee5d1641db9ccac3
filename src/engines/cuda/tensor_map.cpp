#include "engines/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include "core/text.h"
#include "engines/cuda/device.h"
#include "engines/cuda/driver.h"
#include "headway/error.h"

namespace headway::cuda {
namespace {

constexpr std::int64_t alignment = 16;
constexpr std::int64_t longest_stride = std::int64_t{1} << 40;
constexpr int box_columns = 64;

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encode_function() {
  static const auto function = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled"));
  return function;
}

std::int64_t element_bytes(const ConstTensorView& view) { return static_cast<std::int64_t>(size_of(view.dtype())); }

// Whether an axis has steps that the engine can take; a repeated element is not stepped over.
bool has_good_stride(const ConstTensorView& view, int axis, bool may_repeat) {
  const std::int64_t bytes = view.stride(axis) * element_bytes(view);
  return view.size(axis) <= 1 || (may_repeat && bytes == 0) ||
         (bytes > 0 && bytes % alignment == 0 && bytes < longest_stride);
}

CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::bf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::f32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

CUtensorMap encoded(const ConstTensorView& view, MatrixBox shape, std::string_view operation,
                    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  const Encode encode = encode_function();
  if (encode == nullptr) {
    throw DeviceError(text(operation, ": the CUDA driver offers no tensor maps (cuTensorMapEncodeTiled)"));
  }
  // From the fastest axis to the slowest.
  cuuint64_t sizes[4] = {static_cast<cuuint64_t>(view.size(3)), 1, 1, 1};
  cuuint64_t strides[3] = {alignment, alignment, alignment};
  for (int k = 0; k < 3; ++k) {
    const int axis = 2 - k;
    if (view.size(axis) > 1 && view.stride(axis) != 0) {
      sizes[k + 1] = static_cast<cuuint64_t>(view.size(axis));
      strides[k] = static_cast<cuuint64_t>(view.stride(axis) * element_bytes(view));
    }
  }
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(shape.columns), static_cast<cuuint32_t>(shape.rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const bool narrow = shape.columns * element_bytes(view) <= 64;
  CUtensorMap map;
  const CUresult result =
      encode(&map, map_type(view.dtype()), 4, const_cast<void*>(view.data()), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, promotion,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw DeviceError(text(operation, ": making a tensor map of shape ", view.sizes(), " and strides ", view.strides(),
                           ": CUDA says error ", static_cast<int>(result)));
  }
  return map;
}

}  // namespace

std::optional<std::string> map_refusal(const char* name, const ConstTensorView& view) {
  if (reinterpret_cast<std::uintptr_t>(view.data()) % alignment != 0) {
    return text(name, " does not begin at a multiple of ", alignment, " bytes");
  }
  if (view.size(3) > 1 && view.stride(3) != 1) {
    return text(name, " has stride ", view.stride(3), " along its features, expected 1");
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (!has_good_stride(view, axis, axis < 2)) {
      return text(name, " has strides ", view.strides(), ", expected positive multiples of ",
                  alignment / element_bytes(view));
    }
  }
  return std::nullopt;
}

CUtensorMap tensor_map(const ConstTensorView& view, int rows, std::string_view operation) {
  return encoded(view, {box_columns, rows}, operation);
}

CUtensorMap stream_map(const ConstTensorView& view, int rows, std::string_view operation) {
  return encoded(view, {box_columns, rows}, operation, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

bool is_mappable(const ConstTensorView& matrix) {
  return reinterpret_cast<std::uintptr_t>(matrix.data()) % alignment == 0 &&
         (matrix.size(3) <= 1 || matrix.stride(3) == 1) && has_good_stride(matrix, 0, true) &&
         has_good_stride(matrix, 1, true) && has_good_stride(matrix, 2, true);
}

CUtensorMap matrix_map(const ConstTensorView& matrix, MatrixBox box, std::string_view operation) {
  return encoded(matrix, box, operation);
}

}  // namespace headway::cuda
