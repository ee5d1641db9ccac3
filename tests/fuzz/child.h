// Runs a case on one target, in this process or in one of its own, and memory that processes share.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "fuzz/runner.h"

namespace headway::test::fuzz {

// A value in memory that processes share after a fork.
template <class T>
class Shared {
 public:
  Shared() {
    void* memory = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    value_ = new (memory) T{};
  }
  ~Shared() { munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() { return value_; }
  T& operator*() { return *value_; }

 private:
  T* value_;
};

// A failure in shared memory.
class SharedFailure {
 public:
  void set(const Failure& failure);
  Failure get() const { return {check_, text_}; }
  explicit operator bool() const { return is_set_; }
  void clear() { is_set_ = false; }

 private:
  std::atomic<bool> is_set_{false};
  char check_[200] = {};
  char text_[2000] = {};
};

// In this process; it never throws. A case that takes too long ends the process by SIGALRM.
Verdict run_here(const Prepared& prepared, const Target& target);

// What the end of a process says that should have reported for itself, if that is a failure.
std::optional<Failure> failure_of_process(int status);

using Batch = std::vector<std::unique_ptr<Prepared>>;

// Runs the cases from `begin` on, in a process of their own, until one fails. Where one does, `end` is its number and
// `verdict` says how; else `end` is the number of cases.
struct BatchResult {
  std::size_t end = 0;
  std::int64_t refused = 0;
  Verdict verdict;
};
BatchResult run_batch(const Batch& batch, std::size_t begin, const Target& target);

}  // namespace headway::test::fuzz
