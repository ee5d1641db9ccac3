// How many threads a call uses, and whose they are.
#include "headway/threads.h"

#include <dlfcn.h>

#include "functions.h"

namespace headway::python {
namespace {

// The two functions of GCC's OpenMP runtime that others' runtimes have too.
void (*parallel)(void (*work)(void*), void* context, unsigned threads, unsigned flags) = nullptr;
int (*most_threads)() = nullptr;

template <class Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
}

// A team of any other size would have OpenMP end threads, and start them again for its next user.
void on_openmp_threads(void (*work)(void*), void* context) {
  parallel(work, context, static_cast<unsigned>(most_threads()), 0);
}

// Has calls run on the OpenMP threads of a library that is loaded already; false where it has none. OpenMP's threads
// spin for milliseconds after their last task, so that threads beside them would get half of a CPU.
bool share_openmp_threads(const char* path) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return false;
  }
  find(library, "GOMP_parallel", parallel);
  find(library, "omp_get_max_threads", most_threads);
  const bool found = parallel != nullptr && most_threads != nullptr;
  set_executor(found ? on_openmp_threads : nullptr);
  return found;
}

}  // namespace

void add_threads(nb::module_& module) {
  module.def("set_threads", &set_threads).def("get_threads", &get_threads);
  module.def("share_openmp_threads", &share_openmp_threads);
  module.def("release_memory", &release_memory, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace headway::python
