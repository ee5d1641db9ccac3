// Running numbered tasks on the library's own threads, or on those that a program lends (set_executor).
//
// The library's threads start with the first call that needs them, as many as the system grants, spin for a moment
// after a call and then sleep. A call from inside a task runs its tasks itself; so does one that comes while another
// user thread holds the pool, until the pool is free. A forked child starts threads of its own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/shown.h"

namespace headway {

// A borrowed callable: void(std::int64_t task, int worker). `worker` is below the number of threads and no two tasks
// that run at the same time have the same one, so it may index scratch.
class TaskFunction {
 public:
  template <class Callable>
  requires(!std::is_same_v<std::remove_cvref_t<Callable>, TaskFunction>)
      TaskFunction(Callable&& callable)  // NOLINT(google-explicit-constructor)
      : object_(const_cast<void*>(static_cast<const void*>(&callable))),
        call_([](void* object, std::int64_t task, int worker) {
          (*static_cast<std::remove_reference_t<Callable>*>(object))(task, worker);
        }) {}
  void operator()(std::int64_t task, int worker) const { call_(object_, task, worker); }

 private:
  void* object_;
  void (*call_)(void*, std::int64_t, int);
};

// Runs tasks 0 .. count - 1, started in this order, on at most `threads` threads, the caller's among them. The first
// exception of a task stops the tasks not yet started and is thrown here when those under way have ended.
HEADWAY_SHOWN void parallel_for(std::int64_t count, int threads, TaskFunction task);

}  // namespace headway
