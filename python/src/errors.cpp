#include "errors.h"

#include <new>
#include <system_error>

namespace headway::python {
namespace {

// Methods of a class as Python writes them: KVCache.append, not KVCache::append.
std::string python_text(const Error& error) {
  std::string result = error.what();
  if (const std::string inner = "KVCache::"; result.starts_with(inner)) {
    result.replace(0, inner.size(), "KVCache.");
  }
  return result;
}

void set(PyObject* type, const Error& error) { PyErr_SetString(type, python_text(error).c_str()); }

// headway.OutOfPages, which is a MemoryError.
void set_out_of_pages(const Error& error) {
  const nb::object type = nb::module_::import_("headway._errors").attr("OutOfPages");
  set(type.ptr(), error);
}

// The errno of a system call that failed, nested in the error; 0 if none is.
int errno_of(const FileError& error) noexcept {
  try {
    std::rethrow_if_nested(error);
  } catch (const std::system_error& nested) {
    return nested.code().value();
  }
  return 0;
}

// As open() has it: FileNotFoundError, FileExistsError, PermissionError, ... and an OSError for a file that violates
// its format.
void set_os_error(const FileError& error) {
  const nb::object make = nb::module_::import_("headway._errors").attr("os_error");
  const nb::object made = make(errno_of(error), python_text(error));
  PyErr_SetObject(made.type().ptr(), made.ptr());
}

}  // namespace

void set_python_error() noexcept {
  try {
    throw;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const UnknownSequence& error) {
    set(PyExc_KeyError, error);
  } catch (const InvalidArgument& error) {
    set(PyExc_ValueError, error);
  } catch (const TypeMismatch& error) {
    set(PyExc_TypeError, error);
  } catch (const OutOfPages& error) {
    set_out_of_pages(error);
  } catch (const OutOfMemory& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const Unsupported& error) {
    set(PyExc_NotImplementedError, error);
  } catch (const FileError& error) {
    set_os_error(error);
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
