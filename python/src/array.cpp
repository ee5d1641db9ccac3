#include "array.h"

#include <string_view>

#include "framework.h"
#include "numpy.h"
#include "stream.h"

namespace headway::python {
namespace {

struct TypePair {
  DType dtype;
  dlpack::Type type;
};

constexpr TypePair types[] = {
    {DType::f32, {dlpack::Code::floating, 32, 1}}, {DType::f64, {dlpack::Code::floating, 64, 1}},
    {DType::bf16, {dlpack::Code::bfloat, 16, 1}},  {DType::f16, {dlpack::Code::floating, 16, 1}},
    {DType::b8, {dlpack::Code::boolean, 8, 1}},    {DType::i32, {dlpack::Code::integer, 32, 1}},
    {DType::i64, {dlpack::Code::integer, 64, 1}},
};

bool has_elements(const Dims& sizes) {
  for (const std::int64_t size : sizes) {
    if (size == 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::optional<DType> dtype_from(const std::optional<dlpack::Type>& type) {
  for (const TypePair& pair : types) {
    if (type == pair.type) {
      return pair.dtype;
    }
  }
  return {};
}

dlpack::Type dlpack_type(DType dtype) {
  for (const TypePair& pair : types) {
    if (dtype == pair.dtype) {
      return pair.type;
    }
  }
  return {};
}

bool is_array(nb::handle object) { return is_ndarray(object) || nb::hasattr(object, "__dlpack__"); }

Array::Array(const Argument& argument) : argument_(argument), owner_(nb::borrow(argument.object)) {
  if (is_ndarray(argument.object)) {
    read_numpy();
  } else {
    read_dlpack();
  }
}

Array::Array(const Argument& argument, Readable)
    : argument_(argument), owner_(nb::borrow(argument.object)), exchange_(exchange_api(argument.object.type())) {
  borrow_dlpack();
}

Array::~Array() {
  if (buffer_.obj != nullptr) {
    PyBuffer_Release(&buffer_);
  }
}

// ---- NumPy ----

void Array::read_numpy() {
  const nb::handle object = argument_.object;
  if (!object.type().is(numpy().ndarray) && nb::isinstance(object, numpy().masked_array)) {
    refuse<TypeMismatch>(argument_, "is a masked array: pass its .data, and what is masked as mask=");
  }
  numpy_dtype_ = object.attr("dtype");
  type_ = element_type(numpy_dtype_);
  if (!type_) {
    return;  // only good for an error text
  }
  if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_STRIDED_RO) != 0) {
    throw nb::python_error();
  }
  if (8 * buffer_.itemsize != type_->bits) {  // a subclass may say anything
    refuse<TypeMismatch>(argument_, "has type ", type_text(), " and elements of ", buffer_.itemsize, " bytes");
  }
  check_rank(buffer_.ndim);
  data_ = buffer_.buf;
  read_only_ = buffer_.readonly != 0;
  for (int axis = 0; axis < buffer_.ndim; ++axis) {
    const Py_ssize_t stride = buffer_.strides[axis];
    if (stride % buffer_.itemsize != 0 && buffer_.shape[axis] > 1) {
      refuse<InvalidArgument>(argument_, "has a stride of ", stride, " bytes, expected a multiple of its element's ",
                              buffer_.itemsize, ": copy it first");
    }
    sizes_.push_back(buffer_.shape[axis]);
    strides_.push_back(stride / buffer_.itemsize);
  }
}

// ---- DLPack ----

void Array::read_dlpack() {
  const nb::handle object = argument_.object;
  exchange_ = exchange_api(object.type());
  if (exchange_ == nullptr && !nb::hasattr(object, "__dlpack__")) {
    const bool sequence = nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object);
    refuse<TypeMismatch>(argument_, "must be an array (NumPy, or any with DLPack), found ", class_name(object),
                         sequence ? ": convert it with numpy.asarray" : "");
  }
  owner_ = readable(argument_);
  try {
    if (exchange_ != nullptr && exchange_->tensor_from_object != nullptr) {
      borrow_dlpack();
    } else {
      const std::optional<dlpack::Device> device = dlpack_device(owner_);
      if (device && is_cuda(device->kind)) {
        join_stream(device->index);
        owner_ = dlpack_capsule(owner_, argument_.stream->dlpack_number());
      } else {
        owner_ = dlpack_capsule(owner_, {});
      }
      read_capsule(owner_);
    }
  } catch (nb::python_error& error) {
    const auto reason = to_string(nb::str(error.value()));  // its first line; torch adds a stack trace
    const bool traced = std::string_view(class_name(object)).find("Tracer") != std::string_view::npos;
    nb::raise_from(error, PyExc_TypeError, "%s: %s cannot be read through DLPack: %s%s", argument_.operation,
                   argument_.name, reason.substr(0, reason.find('\n')).c_str(),
                   traced ? "; inside a program that JAX compiles, use headway.jax" : "");
  }
}

void Array::borrow_dlpack() {
  dlpack::Tensor tensor{};
  if (exchange_->tensor_from_object(owner_.ptr(), &tensor) != 0) {
    throw nb::python_error();
  }
  place(tensor);
}

void Array::read_capsule(nb::handle capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed =
        static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != 1) {
      refuse<TypeMismatch>(argument_, "has DLPack version ", managed->version.major, ", expected 1");
    }
    read_only_ = (managed->flags & dlpack::flag_read_only) != 0;
    place(managed->tensor);
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    // The old capsules do not say who may write. JAX still makes them, and its arrays never change.
    read_only_ = !is_mutable(argument_.object);
    place(static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor);
  } else {
    refuse<TypeMismatch>(argument_, "has a __dlpack__ that gives no DLPack capsule");
  }
}

void Array::place(const dlpack::Tensor& tensor) {
  check_rank(tensor.rank);
  place_device(tensor.device);
  type_ = tensor.type;
  data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    sizes_.push_back(tensor.sizes[axis]);
    if (tensor.strides != nullptr) {
      strides_.push_back(tensor.strides[axis]);
    }
  }
  if (tensor.strides == nullptr) {
    strides_ = contiguous_strides(sizes_);
  }
  if (tensor.data == nullptr && has_elements(sizes_)) {
    refuse<InvalidArgument>(argument_, "has shape ", sizes_, " and no memory");
  }
}

void Array::place_device(dlpack::Device device) {
  switch (device.kind) {
    case dlpack::DeviceKind::cpu:
    case dlpack::DeviceKind::cuda_host:
    case dlpack::DeviceKind::rocm_host: return;
    case dlpack::DeviceKind::cuda:
    case dlpack::DeviceKind::cuda_managed:
      join_stream(device.index);
      device_ = {DeviceType::cuda, device.index};
      return;
  }
  refuse<Unsupported>(argument_, "is on DLPack's device ", static_cast<int>(device.kind), ", expected CPU or CUDA");
}

// The call's work is queued where this array's library works.
void Array::join_stream(int device) const {
  if (argument_.stream == nullptr) {
    refuse<Unsupported>(argument_, "is on ", Device{DeviceType::cuda, device}, ", expected host memory");
  }
  argument_.stream->join(argument_, exchange_, device);
}

// ---- Both ----

void Array::check_rank(std::int64_t rank) const {
  if (rank < 0 || rank > Dims::max_rank) {
    refuse<InvalidArgument>(argument_, "has ", rank, " axes, expected at most ", Dims::max_rank);
  }
}

void Array::check_bytes(DType dtype) const {
  try {
    checked_elements(sizes_, dtype);
  } catch (const InvalidArgument&) {
    refuse<InvalidArgument>(argument_, "has shape ", sizes_, ", expected sizes of at most 2^63 bytes in all");
  }
}

ConstTensorView Array::view(const char* expected) const {
  const std::optional<DType> dtype = dtype_from(type_);
  if (!dtype) {
    refuse<TypeMismatch>(argument_, "has type ", type_text(), ", expected ", expected);
  }
  check_bytes(*dtype);
  return {data_, *dtype, sizes_, strides_, device_};
}

ConstTensorView Array::page_view() const {
  constexpr dlpack::Type int8{dlpack::Code::integer, 8, 1}, fp8{dlpack::Code::float8_e4m3fn, 8, 1};
  if (type_ != int8 && type_ != fp8) {
    return view("f32, f64, bf16, f16, int8 or float8_e4m3fn");
  }
  check_bytes(DType::i8);
  return {data_, type_ == int8 ? DType::i8 : DType::f8e4m3, sizes_, strides_, device_};
}

TensorView Array::writable_view() const {
  const ConstTensorView readable = view();
  if (read_only_) {
    refuse<InvalidArgument>(argument_, "is read-only, expected an array that may be written");
  }
  return {data_, readable.dtype(), sizes_, strides_, device_};
}

std::string Array::type_text() const {
  if (is_numpy()) {
    const bool is_native = nb::cast<bool>(numpy_dtype_.attr("isnative"));
    return to_string(nb::str(numpy_dtype_)) + (is_native ? "" : " (not this machine's byte order)");
  }
  if (nb::hasattr(argument_.object, "dtype")) {
    return to_string(nb::str(nb::object(argument_.object.attr("dtype"))));
  }
  return text("DLPack code ", static_cast<int>(type_->code), " with ", static_cast<int>(type_->bits), " bits");
}

}  // namespace headway::python
