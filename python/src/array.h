// Array arguments: NumPy arrays through the buffer protocol, everything else through DLPack. Nothing is copied.
#pragma once

#include <optional>
#include <string>

#include "dlpack.h"
#include "errors.h"

namespace headway::python {

class CallStream;

// An argument and who asks for it; the names are for error texts.
struct Argument {
  const char* operation;
  const char* name;
  nb::handle object;
  CallStream* stream = nullptr;  // of the call that the argument belongs to
  bool is_recorded = false;      // the caller records gradients itself: an array that requires them is read as it is
};

// "attention: query " and what is wrong with it.
template <class Error, class... Parts>
[[noreturn]] void refuse(const Argument& argument, const Parts&... parts) {
  throw Error(text(argument.operation, ": ", argument.name, " ", parts...));
}

// What an array is, where its memory lies, and, as long as this object lives, that the memory stays.
class Array {
 public:
  // TypeMismatch for what is neither a NumPy array nor offers DLPack.
  explicit Array(const Argument& argument);
  // A torch tensor that is known to be readable as it is: of a type with DLPack's C functions, and not stored negated.
  struct Readable {};
  Array(const Argument& argument, Readable);
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  // TypeMismatch, saying what was expected, for element types that no tensor holds.
  ConstTensorView view(const char* expected = "f32, f64, bf16 or f16") const;
  // The same, and int8 and float8_e4m3fn too: pages of quantised keys and values.
  ConstTensorView page_view() const;
  TensorView writable_view() const;

  const Argument& argument() const { return argument_; }
  std::optional<dlpack::Type> type() const { return type_; }  // none for types that DLPack cannot say
  std::string type_text() const;                              // as the array's own library writes it
  const Dims& sizes() const { return sizes_; }
  Device device() const { return device_; }
  bool is_numpy() const { return numpy_dtype_.is_valid(); }
  nb::handle numpy_dtype() const { return numpy_dtype_; }
  const dlpack::ExchangeApi* exchange() const { return exchange_; }  // where its type has one

 private:
  void read_numpy();
  void read_dlpack();
  void borrow_dlpack();
  void read_capsule(nb::handle capsule);
  void place(const dlpack::Tensor& tensor);
  void place_device(dlpack::Device device);
  void join_stream(int device) const;
  void check_rank(std::int64_t rank) const;
  void check_bytes(DType dtype) const;

  Argument argument_;
  std::optional<dlpack::Type> type_;
  Dims sizes_, strides_;
  void* data_ = nullptr;
  Device device_;
  bool read_only_ = false;

  nb::object owner_;  // what keeps the memory: the argument itself, or a DLPack capsule
  nb::object numpy_dtype_;
  Py_buffer buffer_{};
  const dlpack::ExchangeApi* exchange_ = nullptr;
};

std::optional<DType> dtype_from(const std::optional<dlpack::Type>& type);
dlpack::Type dlpack_type(DType dtype);

// True for what can be an Array.
bool is_array(nb::handle object);

}  // namespace headway::python
