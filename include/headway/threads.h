// The threads of the CPU engine, on which results do not depend, and the memory that is kept between calls.
#pragma once

#include <cstdint>

#include "headway/cxx20.h"

#pragma GCC visibility push(default)
namespace headway {

// The number of threads a call may use, the caller's own included. Initially HEADWAY_THREADS, else OMP_NUM_THREADS,
// else the number of CPUs this process may run on. Threads start with the first call that needs them. InvalidArgument
// if HEADWAY_THREADS is not a positive number.
int get_threads();

// InvalidArgument unless threads >= 1. Calls in progress keep their number of threads.
void set_threads(int threads);

// Makes calls run on a program's own threads, since two thread pools would compete for the same CPUs. An executor calls
// work(context) once on each of its threads, including the caller's, and returns when all calls have returned; at most
// get_threads() of them are used. Progress is reported on the caller's thread, as without an executor. Null restores
// the library's own threads, and so does a fork.
using Executor = void (*)(void (*work)(void* context), void* context);
void set_executor(Executor executor);

// Frees the memory that is kept for later calls, and returns its number of bytes: freed tensors and workspaces (at most
// 256 MB), the scratch of each thread that made a call (64 MB) or worked on one (8 MB), and unused memory in the
// library's memory pools on GPUs. Calls in progress keep theirs; tensors, layers and caches are not touched.
std::int64_t release_memory();

}  // namespace headway
#pragma GCC visibility pop
