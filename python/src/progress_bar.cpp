#include "progress_bar.h"

#include "ending.h"

namespace headway::python {

ProgressBar::ProgressBar(const char* operation, nb::handle wanted)
    : bar_(nb::module_::import_("headway._progress")
               .attr("bar_for")(wanted.is_valid() ? wanted : nb::none(), operation)) {}

ProgressBar::~ProgressBar() {
  if (bar_.is_none()) {
    return;
  }
  const nb::error_scope kept;  // an exception may be on its way, and stays the one that is seen
  PyObject* closed = outliving_python([&] { return PyObject_CallMethod(bar_.ptr(), "close", nullptr); });
  if (closed == nullptr) {
    PyErr_Clear();
  }
  Py_XDECREF(closed);
}

}  // namespace headway::python
