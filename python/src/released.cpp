#include "released.h"

#include <pthread.h>

#include "ending.h"

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

Released::Released(Progress& progress, nb::handle report) : report_(report), state_(nullptr) {
  progress = [this](double share) { return go_on(share); };
  state_ = PyEval_SaveThread();
}

Released::~Released() {
  outliving_python([&] { PyEval_RestoreThread(state_); });
}

bool Released::go_on(double share) {
  const bool on_main_thread = PyThread_get_thread_ident() == main_thread;
  if (share >= 1.0 || (!on_main_thread && report_.is_none())) {
    return true;
  }
  outliving_python([&] { PyEval_RestoreThread(state_); });
  bool well = !on_main_thread || PyErr_CheckSignals() == 0;  // otherwise a Python exception is set, and stays set
  if (well && !report_.is_none()) {
    const nb::object done = nb::steal(PyFloat_FromDouble(share));
    PyObject* answer =
        outliving_python([&] { return PyObject_CallFunctionObjArgs(report_.ptr(), done.ptr(), nullptr); });
    well = answer != nullptr;
    Py_XDECREF(answer);
  }
  state_ = PyEval_SaveThread();
  return well;
}

}  // namespace headway::python
