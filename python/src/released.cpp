#include "released.h"

#include <pthread.h>

namespace headway::python {
namespace {

// Python handles signals on its main thread only: the others need not take the GIL to look for them.
unsigned long main_thread = 0;

void this_is_the_main_thread() { main_thread = PyThread_get_thread_ident(); }

}  // namespace

void remember_main_thread() {
  const nb::object thread = nb::module_::import_("threading").attr("main_thread")();
  main_thread = nb::cast<unsigned long>(thread.attr("ident"));
  pthread_atfork(nullptr, nullptr, this_is_the_main_thread);  // a child has one thread, and that is its main one
}

Released::Released(AttentionOptions& options) : state_(nullptr) {
  options.progress = [this](double share) { return no_signal(share); };
  state_ = PyEval_SaveThread();
}

bool Released::no_signal(double share) {
  if (share >= 1.0 || PyThread_get_thread_ident() != main_thread) {
    return true;
  }
  PyEval_RestoreThread(state_);
  const bool none = PyErr_CheckSignals() == 0;  // otherwise a Python exception is set, and stays set
  state_ = PyEval_SaveThread();
  return none;
}

}  // namespace headway::python
