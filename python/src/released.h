// Work without the GIL that Ctrl-C can still stop.
#pragma once

#include "errors.h"

namespace headway::python {

// Called once, when the module is imported.
void remember_main_thread();

class Released {
 public:
  // Releases the GIL.
  Released() : report_(Py_None), state_(PyEval_SaveThread()) {}
  // The same, and makes `options.progress` check for signals now and then.
  explicit Released(AttentionOptions& options) : Released(options.progress, nb::handle(Py_None)) {}
  // The same for `progress`, and tells `report` the share that is done, unless it is None.
  Released(Progress& progress, nb::handle report);
  ~Released();
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  bool go_on(double share);

  nb::handle report_;
  PyThreadState* state_;
};

}  // namespace headway::python
