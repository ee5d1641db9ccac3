// Errors between C++ and Python: Headway's classes become Python's, the texts stay.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <sstream>
#include <string>

#include "headway/headway.h"

namespace headway::python {

namespace nb = nanobind;

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Sets the Python exception for the std::exception that is being handled. Nothing here throws any other, and to catch
// all would catch pthread_exit too (see ending.h).
void set_python_error() noexcept;

// A Python string, with what UTF-8 cannot say (half a surrogate pair) written as an escape.
std::string to_string(nb::handle string);

// The name of a Python object's type, for error texts: "list", "Tensor".
std::string class_name(nb::handle object);

// A Python call that returned a new reference, or null with an exception set.
inline nb::object checked(PyObject* result) {
  if (result == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(result);
}

}  // namespace headway::python
