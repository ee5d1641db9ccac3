// How many threads the CPU engine uses. Results do not depend on it.
#pragma once

#include "headway/cxx20.h"

#pragma GCC visibility push(default)
namespace headway {

// The number of threads a call may use, the caller's own included. It starts as HEADWAY_THREADS, else OMP_NUM_THREADS,
// else the number of CPUs this process may run on. Threads start with the first call that needs them. InvalidArgument
// when HEADWAY_THREADS is not a positive number.
int get_threads();

// InvalidArgument unless threads >= 1. Calls that are under way keep their number.
void set_threads(int threads);

// A program with threads of its own can lend them: two sets of threads on the same CPUs take them from each other. An
// executor calls work(context) once on each of its threads, the caller's among them, and returns when all have
// returned; get_threads() of them at most are used. Progress is reported on the caller's thread, as without an
// executor. Null gives the library its own threads back, and so does a fork.
using Executor = void (*)(void (*work)(void* context), void* context);
void set_executor(Executor executor);

}  // namespace headway
#pragma GCC visibility pop
