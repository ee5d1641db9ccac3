// Arrays for results: of the same library as the input that they belong to.
#pragma once

#include <cstdint>
#include <optional>

#include "array.h"

namespace headway::python {

// The bytes of a result of this type and shape; InvalidArgument when they pass 2^63.
std::int64_t bytes_of_result(const Argument& argument, DType dtype, const Dims& sizes);

// From here on a result in host memory lies in a Tensor of ours, whose memory serves the next call when it is freed:
// the pages of fresh memory cost more than filling them. Smaller ones are the library's own.
inline constexpr std::int64_t large_result = std::int64_t{2} << 20;  // bytes

// On which device a result is made.
enum class Where : std::uint8_t {
  like,  // that of the array that it belongs to
  host,  // host memory: of the same library if it has arrays there and can make them, else of NumPy
};

class Output {
 public:
  // Uninitialised, contiguous. `like` gives the library and, where it has the same element type, NumPy's dtype.
  Output(const Argument& argument, const Array& like, DType dtype, const Dims& sizes, Where where = Where::like);
  // The same with these strides, of all elements side by side in some order; without any, contiguous. `like` is of a
  // type with DLPack's C functions.
  Output(const Argument& argument, const Array& like, DType dtype, const Dims& sizes,
         const std::optional<Dims>& strides);
  // An array that the user gave to be written.
  explicit Output(const Argument& given);
  Output(const Argument& given, Array::Readable);
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  TensorView view() const { return view_; }
  nb::object finish();  // the array itself; once, when the work is done

 private:
  void allocate_numpy(DType dtype, const Dims& sizes);
  void allocate_exchanged(Device device, DType dtype, Dims sizes);
  void allocate_in_library(const Array& like, DType dtype, const Dims& sizes);
  void allocate_own(const Array& like, DType dtype, const Dims& sizes);
  nb::object own_as_numpy();
  [[noreturn]] void refuse_memory(DType dtype, const Dims& sizes) const;

  Argument argument_;
  TensorView view_;
  nb::object object_;       // the array; for allocate_own what it should be like
  nb::object numpy_dtype_;  // where the array is NumPy's
  std::optional<Array> array_;
  dlpack::ManagedTensorVersioned* managed_ = nullptr;
  const dlpack::ExchangeApi* exchange_ = nullptr;
  std::optional<Tensor> own_;
  std::optional<Dims> strides_;  // where they are not the contiguous ones
};

}  // namespace headway::python
