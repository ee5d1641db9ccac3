// Work without the GIL that Ctrl-C can still stop.
#pragma once

#include "errors.h"

namespace headway::python {

// Called once, when the module is imported.
void remember_main_thread();

class Released {
 public:
  // Gives the GIL up, and has `options.progress` look for signals now and then.
  explicit Released(AttentionOptions& options);
  ~Released() { PyEval_RestoreThread(state_); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  bool no_signal(double share);

  PyThreadState* state_;
};

}  // namespace headway::python
