#include "output.h"

#include <nanobind/ndarray.h>

#include <memory>
#include <string>
#include <utility>

#include "framework.h"
#include "numpy.h"

namespace headway::python {
namespace {

dlpack::Device dlpack_device(Device device) {
  return {device.type == DeviceType::cuda ? dlpack::DeviceKind::cuda : dlpack::DeviceKind::cpu, device.index};
}

nb::object shape_tuple(const Dims& sizes) {
  nb::object shape = checked(PyTuple_New(sizes.size()));
  for (int axis = 0; axis < sizes.size(); ++axis) {
    PyTuple_SetItem(shape.ptr(), axis, checked(PyLong_FromLongLong(sizes[axis])).release().ptr());
  }
  return shape;
}

// A tensor on its way to another library, with what DLPack says about it.
struct Lent {
  Tensor tensor;
  Dims sizes, strides;
  dlpack::ManagedTensorVersioned managed;
};

dlpack::ManagedTensorVersioned* lend(Tensor&& tensor) {
  auto* lent = new Lent{std::move(tensor), {}, {}, {}};
  lent->sizes = lent->tensor.sizes();
  lent->strides = contiguous_strides(lent->sizes);
  lent->managed = {.version = {1, 0},
                   .context = lent,
                   .deleter = [](dlpack::ManagedTensorVersioned* self) { delete static_cast<Lent*>(self->context); },
                   .flags = 0,
                   .tensor = {.data = lent->tensor.data(),
                              .device = dlpack_device({}),
                              .rank = lent->sizes.size(),
                              .type = dlpack_type(lent->tensor.dtype()),
                              .sizes = &lent->sizes[0],
                              .strides = &lent->strides[0],
                              .byte_offset = 0}};
  return &lent->managed;
}

}  // namespace

std::int64_t bytes_of_result(const Argument& argument, DType dtype, const Dims& sizes) {
  try {
    return checked_elements(sizes, dtype) * static_cast<std::int64_t>(size_of(dtype));
  } catch (const InvalidArgument&) {
    refuse<InvalidArgument>(argument, "of shape ", sizes, " would have more than 2^63 bytes");
  }
}

Output::Output(const Argument& argument, const Array& like, DType dtype, const Dims& sizes, Where where)
    : argument_(argument) {
  const std::int64_t bytes = bytes_of_result(argument_, dtype, sizes);
  exchange_ = like.exchange();
  if (like.is_numpy()) {
    numpy_dtype_ = nb::borrow(dtype_from(like.type()) == dtype ? like.numpy_dtype() : numpy().dtype(dtype));
  }
  const Device device = where == Where::host ? Device{} : like.device();
  if (exchange_ == nullptr && device != like.device()) {
    numpy_dtype_ = nb::borrow(numpy().dtype(dtype));
  }
  if (bytes >= large_result && device == Device{}) {
    allocate_own(like, dtype, sizes);
  } else if (numpy_dtype_.is_valid()) {
    allocate_numpy(dtype, sizes);
  } else if (exchange_ != nullptr) {
    allocate_exchanged(device, dtype, sizes);
  } else if (device.type == DeviceType::cuda) {
    allocate_in_library(like, dtype, sizes);
  } else {
    allocate_own(like, dtype, sizes);
  }
}

Output::Output(const Argument& argument, const Array& like, DType dtype, const Dims& sizes,
               const std::optional<Dims>& strides)
    : Output(argument, like, dtype, sizes) {
  if (strides) {
    strides_ = strides;
    view_ = TensorView(view_.data(), dtype, sizes, *strides, view_.device());
  }
}

Output::Output(const Argument& given) : argument_(given), object_(nb::borrow(given.object)) {
  array_.emplace(given);
  view_ = array_->writable_view();
}

Output::Output(const Argument& given, Array::Readable readable) : argument_(given), object_(nb::borrow(given.object)) {
  array_.emplace(given, readable);
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

void Output::allocate_numpy(DType dtype, const Dims& sizes) {
  const nb::object shape = shape_tuple(sizes);
  PyObject* arguments[] = {shape.ptr(), numpy_dtype_.ptr()};
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

void Output::allocate_exchanged(Device device, DType dtype, Dims sizes) {
  Dims strides = contiguous_strides(sizes);
  dlpack::Tensor prototype{.data = nullptr,
                           .device = dlpack_device(device),
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
  view_ = TensorView(static_cast<char*>(tensor.data) + tensor.byte_offset, dtype, sizes, device);
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

// An array whose base is the memory's owner.
nb::object Output::own_as_numpy() {
  auto tensor = std::make_unique<Tensor>(std::move(*own_));
  const nb::object shape = shape_tuple(tensor->sizes());
  void* data = tensor->data();
  const std::size_t bytes = static_cast<std::size_t>(tensor->elements()) * size_of(tensor->dtype());
  const nb::capsule owner(tensor.release(), [](void* memory) noexcept { delete static_cast<Tensor*>(memory); });
  const nb::ndarray<std::uint8_t, nb::array_api> buffer(data, {bytes}, owner);
  return numpy().ndarray(shape, numpy_dtype_, nb::cast(buffer));
}

nb::object Output::finish() {
  if (own_ && numpy_dtype_.is_valid()) {
    return own_as_numpy();
  }
  if (own_ && exchange_ != nullptr) {
    managed_ = lend(std::move(*own_));
  }
  if (managed_ != nullptr) {
    void* object = nullptr;
    Dims sizes = view_.sizes();
    if (strides_) {  // read, and copied, by the call that takes the tensor over
      managed_->tensor.sizes = &sizes[0];
      managed_->tensor.strides = &(*strides_)[0];
    }
    if (exchange_->managed_to_object(std::exchange(managed_, nullptr), &object) != 0) {
      throw nb::python_error();
    }
    return nb::steal(static_cast<PyObject*>(object));
  }
  return own_ ? array_like(object_, std::move(*own_)) : object_;
}

}  // namespace headway::python
