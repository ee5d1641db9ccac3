#include "output.h"

#include <string>
#include <utility>

#include "framework.h"
#include "numpy.h"

namespace headway::python {
namespace {

dlpack::Device dlpack_device(Device device) {
  return {device.type == DeviceType::cuda ? dlpack::DeviceKind::cuda : dlpack::DeviceKind::cpu, device.index};
}

}  // namespace

Output::Output(const Argument& argument, const Array& like, DType dtype, const Dims& sizes) : argument_(argument) {
  try {
    checked_elements(sizes, dtype);
  } catch (const InvalidArgument&) {
    refuse<InvalidArgument>(argument_, "of shape ", sizes, " would have more than 2^63 bytes");
  }
  if (like.is_numpy()) {
    allocate_numpy(like, dtype, sizes);
  } else if (like.exchange() != nullptr) {
    allocate_exchanged(like, dtype, sizes);
  } else if (like.device().type == DeviceType::cuda) {
    allocate_in_library(like, dtype, sizes);
  } else {
    allocate_own(like, dtype, sizes);
  }
}

Output::Output(const Argument& given) : argument_(given), object_(nb::borrow(given.object)) {
  array_.emplace(given);
  view_ = array_->writable_view();
}

Output::~Output() {
  if (managed_ != nullptr && managed_->deleter != nullptr) {
    managed_->deleter(managed_);
  }
}

void Output::refuse_memory(DType dtype, const Dims& sizes) const {
  const double bytes = static_cast<double>(checked_elements(sizes, dtype)) * static_cast<double>(size_of(dtype));
  throw OutOfMemory(text(argument_.operation, ": could not allocate ", bytes, " bytes for ", argument_.name,
                         " of shape ", sizes, ", ", dtype));
}

void Output::allocate_numpy(const Array& like, DType dtype, const Dims& sizes) {
  const nb::object shape = checked(PyTuple_New(sizes.size()));
  for (int axis = 0; axis < sizes.size(); ++axis) {
    PyTuple_SetItem(shape.ptr(), axis, checked(PyLong_FromLongLong(sizes[axis])).release().ptr());
  }
  const bool same_type = dtype_from(like.type()) == dtype;
  PyObject* arguments[] = {shape.ptr(), (same_type ? like.numpy_dtype() : numpy().dtype(dtype)).ptr()};
  object_ = nb::steal(PyObject_Vectorcall(numpy().empty.ptr(), arguments, 2, nullptr));
  if (!object_.is_valid()) {
    nb::python_error error;
    if (error.matches(PyExc_MemoryError)) {
      refuse_memory(dtype, sizes);
    }
    throw error;
  }
  array_.emplace(Argument{argument_.operation, argument_.name, object_});
  view_ = array_->writable_view();
}

void Output::allocate_in_library(const Array& like, DType dtype, const Dims& sizes) {
  object_ = empty_like(argument_, like, dtype, sizes);
  array_.emplace(Argument{argument_.operation, argument_.name, object_, argument_.stream});
  view_ = array_->writable_view();
  if (view_.device() != like.device()) {
    refuse<InvalidArgument>(argument_, "was made on ", view_.device(), ", expected ", like.device(),
                            ": make that the current device");
  }
}

void Output::allocate_exchanged(const Array& like, DType dtype, Dims sizes) {
  exchange_ = like.exchange();
  Dims strides = contiguous_strides(sizes);
  dlpack::Tensor prototype{.data = nullptr,
                           .device = dlpack_device(like.device()),
                           .rank = sizes.size(),
                           .type = dlpack_type(dtype),
                           .sizes = &sizes[0],
                           .strides = &strides[0],
                           .byte_offset = 0};
  if (exchange_->allocate(&prototype, &managed_, nullptr, [](void*, const char*, const char*) {}) != 0) {
    PyErr_Clear();
    managed_ = nullptr;
    refuse_memory(dtype, sizes);
  }
  const dlpack::Tensor& tensor = managed_->tensor;
  view_ = TensorView(static_cast<char*>(tensor.data) + tensor.byte_offset, dtype, sizes, like.device());
}

void Output::allocate_own(const Array& like, DType dtype, const Dims& sizes) {
  try {
    own_ = Tensor::uninitialized(sizes, dtype);
  } catch (const OutOfMemory&) {
    refuse_memory(dtype, sizes);
  }
  object_ = nb::borrow(like.argument().object);
  view_ = own_->view();
}

nb::object Output::finish() {
  if (managed_ != nullptr) {
    void* object = nullptr;
    if (exchange_->managed_to_object(std::exchange(managed_, nullptr), &object) != 0) {
      throw nb::python_error();
    }
    return nb::steal(static_cast<PyObject*>(object));
  }
  return own_ ? array_like(object_, std::move(*own_)) : object_;
}

}  // namespace headway::python
