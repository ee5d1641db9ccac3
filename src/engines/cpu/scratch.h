// Scratch memory of one thread: kept from call to call, so that small calls do not pay for fresh pages.
#pragma once

#include <cstdint>

namespace headway::cpu {

// At least `bytes`, 64-byte aligned, of the calling thread; valid until the thread asks again. Throws std::bad_alloc.
void* thread_scratch(std::int64_t bytes);

// The same from a second buffer: for the thread that makes a call, to share with those that work on it.
void* shared_scratch(std::int64_t bytes);

// Give back what is larger than a thread should keep.
void trim_thread_scratch();
void trim_shared_scratch();

}  // namespace headway::cpu
