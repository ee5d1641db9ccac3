#include "errors.h"

#include <new>

namespace headway::python {

void set_python_error() noexcept {
  try {
    throw;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const TypeMismatch& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const OutOfMemory& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const Unsupported& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const FileError& error) {
    PyErr_SetString(PyExc_OSError, error.what());
  } catch (const Cancelled& error) {
    // What stopped the call is a signal handler's exception, which is still set.
    if (PyErr_Occurred() == nullptr) {
      PyErr_SetString(PyExc_KeyboardInterrupt, error.what());
    }
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

std::string to_string(nb::handle string) {
  const nb::object encoded = checked(PyUnicode_AsEncodedString(string.ptr(), "utf-8", "backslashreplace"));
  return {PyBytes_AsString(encoded.ptr()), static_cast<std::size_t>(PyBytes_Size(encoded.ptr()))};
}

std::string class_name(nb::handle object) { return to_string(object.type().attr("__name__")); }

}  // namespace headway::python
