#include "progress_bar.h"

namespace headway::python {

ProgressBar::ProgressBar(nb::handle wanted)
    : bar_(nb::module_::import_("headway._progress").attr("bar_for")(wanted.is_valid() ? wanted : nb::none())) {}

ProgressBar::~ProgressBar() {
  if (bar_.is_none()) {
    return;
  }
  const nb::error_scope kept;  // an exception may be on its way, and stays the one that is seen
  const nb::object closed = nb::steal(PyObject_CallMethod(bar_.ptr(), "close", nullptr));
  if (!closed.is_valid()) {
    PyErr_Clear();
  }
}

}  // namespace headway::python
