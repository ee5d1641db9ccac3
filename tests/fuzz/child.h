// Processes that run cases on one target, and memory that they share with the one that waits for them.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <functional>
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

using Batch = std::vector<std::unique_ptr<Prepared>>;

// Runs the cases from `begin` on until one fails. Where one does, `end` is its number and `verdict` says how; else
// `end` is the number of cases.
struct BatchResult {
  std::size_t end = 0;
  std::int64_t refused = 0, comparisons = 0;
  Verdict verdict;
};
BatchResult run_batch(const Batch& batch, std::size_t begin, const Target& target, bool batch_invariant,
                      const std::function<bool()>& stopped);

}  // namespace headway::test::fuzz
