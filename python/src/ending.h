// Threads that are still in a call when Python ends.
#pragma once

#include <cxxabi.h>
#include <unistd.h>

namespace headway::python {

// Runs `body`, which takes the GIL or calls Python. Before version 3.14 an ending Python stops every other thread that
// asks for the GIL by pthread_exit, which unwinds the thread's stack: through destructors that release Python objects
// without the GIL, and into noexcept functions, which then abort the process. Such a thread sleeps here instead until
// the process ends, as all do from 3.14 on. `body` must own nothing that a destructor releases.
template <class Body>
auto outliving_python(const Body& body) -> decltype(body()) {
#ifdef __GLIBCXX__  // where pthread_exit is an exception
  try {
    return body();
  } catch (abi::__forced_unwind&) {
    for (;;) {
      pause();
    }
  }
#else
  return body();
#endif
}

}  // namespace headway::python
