// The little that is known about other array libraries: how to reach their memory, and how to hand them ours.
#pragma once

#include "array.h"

namespace headway::python {

// The C functions that an array type offers, or null.
const dlpack::ExchangeApi* exchange_api(nb::handle type);

bool is_torch(nb::handle object);

// The argument itself; or, where it would record gradients but recording is off, the same memory without. An error
// where recording is on: what happens here would not be recorded.
nb::object without_gradient(const Argument& argument);

// What object.__dlpack__ gives.
nb::object dlpack_capsule(nb::handle object);

// The tensor as an array of the library that `like` comes from.
nb::object array_like(nb::handle like, Tensor&& tensor);

}  // namespace headway::python
