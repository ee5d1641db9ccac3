// The CUDA stream that a call's work is queued on.
#pragma once

#include <string>

#include "array.h"

namespace headway::python {

// The current stream of a library. All CUDA arrays of a call come from one library, so its stream order is sufficient:
// work queued before the call is done before it, and memory freed afterwards is not reused before the call's work is
// done.
class CallStream {
 public:
  // Says that `argument` lies on a CUDA device. InvalidArgument when it comes from another library than the others.
  void join(const Argument& argument, const dlpack::ExchangeApi* exchange, int device);

  void* value() const { return stream_; }  // a cudaStream_t; null: the default stream
  std::uintptr_t dlpack_number() const;    // as __dlpack__(stream=) wants it

 private:
  nb::handle type_;  // of the first array, which outlives the call
  const dlpack::ExchangeApi* exchange_ = nullptr;
  const char* first_ = nullptr;
  void* stream_ = nullptr;
};

}  // namespace headway::python
