#include "stream.h"

#include "framework.h"

namespace headway::python {
namespace {

void* address(const nb::object& number) { return PyLong_AsVoidPtr(number.ptr()); }

// The stream on which the library's own functions would queue work. For unknown libraries it is the default stream,
// which synchronizes with other streams.
void* current_stream(nb::handle type, const dlpack::ExchangeApi* exchange, int device) {
  if (exchange != nullptr && exchange->current_stream != nullptr) {
    void* stream = nullptr;
    if (exchange->current_stream(static_cast<std::int32_t>(dlpack::DeviceKind::cuda), device, &stream) != 0) {
      throw nb::python_error();
    }
    return stream;
  }
  const std::string library = root_module(type);
  const nb::object module = loaded_module(library);
  if (library == "torch" && !module.is_none()) {
    return address(module.attr("cuda").attr("current_stream")(device).attr("cuda_stream"));
  }
  if (library == "cupy" && !module.is_none()) {
    return address(module.attr("cuda").attr("get_current_stream")().attr("ptr"));
  }
  return nullptr;
}

}  // namespace

void CallStream::join(const Argument& argument, const dlpack::ExchangeApi* exchange, int device) {
  if (first_ != nullptr && exchange != nullptr && exchange == exchange_) {
    return;
  }
  const nb::handle type = argument.object.type();
  if (first_ == nullptr) {
    stream_ = current_stream(type, exchange, device);
    type_ = type;
    exchange_ = exchange;
    first_ = argument.name;
  } else if (exchange != exchange_ || root_module(type) != root_module(type_)) {
    refuse<InvalidArgument>(argument, "is on a GPU and comes from ", root_module(type), ", ", first_, " from ",
                            root_module(type_), ": expected arrays of one library, whose stream orders the work");
  }
}

std::uintptr_t CallStream::dlpack_number() const {
  // 0 would be ambiguous, so DLPack calls the default stream 1.
  return stream_ == nullptr ? 1 : reinterpret_cast<std::uintptr_t>(stream_);
}

}  // namespace headway::python
