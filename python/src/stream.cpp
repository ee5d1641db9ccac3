#include "stream.h"

#include "framework.h"

namespace headway::python {
namespace {

void* address(const nb::object& number) { return PyLong_AsVoidPtr(number.ptr()); }

// The stream that the library's own functions would queue work on. Libraries that are not known here work on the
// default stream, which waits for what others queued, and they for it.
void* current_stream(const std::string& library, const dlpack::ExchangeApi* exchange, int device) {
  if (exchange != nullptr && exchange->current_stream != nullptr) {
    void* stream = nullptr;
    if (exchange->current_stream(static_cast<std::int32_t>(dlpack::DeviceKind::cuda), device, &stream) != 0) {
      throw nb::python_error();
    }
    return stream;
  }
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
  std::string library = root_module(argument.object.type());
  if (first_ == nullptr) {
    stream_ = current_stream(library, exchange, device);
    library_ = std::move(library);
    exchange_ = exchange;
    first_ = argument.name;
  } else if (exchange != exchange_ || (exchange == nullptr && library != library_)) {
    refuse<InvalidArgument>(argument, "is on a GPU and comes from ", library, ", ", first_, " from ", library_,
                            ": expected arrays of one library, whose stream orders the work");
  }
}

std::uintptr_t CallStream::dlpack_number() const {
  // 0 would be ambiguous, so DLPack calls the default stream 1.
  return stream_ == nullptr ? 1 : reinterpret_cast<std::uintptr_t>(stream_);
}

}  // namespace headway::python
