// Scratch memory, kept by its thread from one use to the next, so that small calls do not pay for fresh pages.
#pragma once

#include <cstdint>

#include "core/memory.h"

namespace headway::cpu {

// Memory of one task or of one call. The first user gets the memory that its thread keeps. A user inside another one (a
// call from a progress callback) gets separate memory, and so does a call after the thread's thread_locals have ended.
class KeptMemory {
 public:
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  // At least `bytes`, 64-byte aligned, uninitialised; invalidates the previous contents. Throws std::bad_alloc.
  void* at_least(std::int64_t bytes);
  void* data() const { return memory_.get(); }

  // Frees the unused memory that threads keep; returns its bytes.
  static std::int64_t release() noexcept;

 protected:
  enum class Owner : std::uint8_t { task, call };
  explicit KeptMemory(Owner owner) noexcept;
  ~KeptMemory();

 private:
  struct Block;
  struct Thread;
  struct Threads;
  static Threads threads;
  static Thread* thread() noexcept;
  static Block* kept(Owner owner) noexcept;

  Owner owner_;
  std::int64_t bytes_ = 0;
  Memory memory_;
};

// Of the task that a thread is in.
struct TaskScratch : KeptMemory {
  TaskScratch() noexcept : KeptMemory(Owner::task) {}
};

// Of a call, for all threads that work on it; kept by the thread that makes the call.
struct CallScratch : KeptMemory {
  CallScratch() noexcept : KeptMemory(Owner::call) {}
};

}  // namespace headway::cpu
