// Properties of the process that the thread pool needs.
#pragma once

#include <sched.h>

namespace headway {

// The CPUs that the process may use: those of all its threads, since a single one may be pinned (OpenMP pins the thread
// that calls us). Empty if the system does not say.
cpu_set_t process_cpus() noexcept;

// Keeps dlclose from unmapping the library, or the plugin that it is linked into, while its threads run in it.
void stay_loaded() noexcept;

}  // namespace headway
