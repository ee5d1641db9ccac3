// Plain Python functions in C++: fast to call, with a signature for help() and inspect.
#pragma once

#include "arguments.h"
#include "ending.h"

namespace headway::python {

// Runs `body`, which returns a Python object; C++ exceptions become Python's. Where Python ends while `body` calls it,
// what `body` holds is released without the GIL: a rare race, and the process is at its end.
template <class Body>
PyObject* guarded(const Body& body) noexcept {
  return outliving_python([&]() -> PyObject* {
    try {
      return body().release().ptr();
    } catch (const std::exception&) {
      set_python_error();
      return nullptr;
    }
  });
}

// A function of METH_FASTCALL as the table of a module holds it.
inline PyCFunction as_method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// `signature` as Python writes it: "engines()".
void add_method(nb::module_& module, const std::string& signature, PyCFunction function, int flags, const char* doc);

// A function with the attention functions' options. Each Body is one function, with one Signature for good. `name` is
// for one that has another name in the module than in error texts.
template <nb::object (*Body)(const Arguments&)>
void add_method(nb::module_& module, Signature&& described, const char* doc, const char* name = nullptr) {
  static const Signature& signature = *new Signature(std::move(described));
  const auto call = [](PyObject*, PyObject* const* values, Py_ssize_t count, PyObject* keywords) -> PyObject* {
    return guarded([&] { return Body(Arguments(signature, values, count, keywords)); });
  };
  PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*) = call;
  std::string shown = signature.python_text();
  if (name != nullptr) {
    shown.replace(0, shown.find('('), name);
  }
  add_method(module, shown, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
             METH_FASTCALL | METH_KEYWORDS, doc);
}

}  // namespace headway::python
