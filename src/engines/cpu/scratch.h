// Scratch memory of one thread: kept from call to call, so that small calls do not pay for fresh pages.
#pragma once

#include <cstdint>

#include "core/memory.h"

namespace headway::cpu {

// At least `bytes`, 64-byte aligned, of the calling thread; valid until the thread asks again. Throws std::bad_alloc.
void* thread_scratch(std::int64_t bytes);

// The same from a second buffer: for the thread that makes a call, to share with those that work on it.
void* shared_scratch(std::int64_t bytes);

// Give back what is larger than a thread should keep.
void trim_thread_scratch();
void trim_shared_scratch();

// Memory of one call for all threads that work on it. The calling thread keeps it for its next call if it is not too
// large, since fresh pages cost as much as the work on them; a call inside the call gets its own.
class CallMemory {
 public:
  CallMemory();
  ~CallMemory();
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  // At least `bytes`, 64-byte aligned, with any contents; forgets what was there. Throws std::bad_alloc.
  void* at_least(std::int64_t bytes);
  void* data() const { return memory_.get(); }

 private:
  struct Kept;
  static Kept& kept();

  Memory memory_;
  std::int64_t bytes_ = 0;
};

}  // namespace headway::cpu
