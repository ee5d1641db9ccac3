// The little that is known about other array libraries: how to reach their memory, and how to hand them ours.
#pragma once

#include "array.h"

namespace headway::python {

// The C functions that an array type offers, or null.
const dlpack::ExchangeApi* exchange_api(nb::handle type);

// Whether arrays of the object's library may be written, where DLPack does not say.
bool is_mutable(nb::handle object);

// The module that a type belongs to, without its submodules: "torch".
std::string root_module(nb::handle type);

// An imported module, or none; imports nothing.
nb::object loaded_module(const std::string& name);

// The argument itself; or, where it would record gradients but recording is off, the same memory without. An error
// where recording is on, as what happens here would not be recorded, and for a tensor that is stored negated, which
// DLPack does not tell. A caller that records gradients itself gets what can be read instead of these errors.
nb::object readable(const Argument& argument);

// Where object.__dlpack_device__ says that it is; none where it says nothing.
std::optional<dlpack::Device> dlpack_device(nb::handle object);

// What object.__dlpack__ gives; for memory on a GPU the number of the stream that will read it.
nb::object dlpack_capsule(nb::handle object, std::optional<std::uintptr_t> stream);

// An array of `like`'s library, type of element and device, uninitialised: for what DLPack's C functions cannot make.
nb::object empty_like(const Argument& argument, const Array& like, DType dtype, const Dims& sizes);

// The tensor as an array of the library that `like` comes from.
nb::object array_like(nb::handle like, Tensor&& tensor);

}  // namespace headway::python
