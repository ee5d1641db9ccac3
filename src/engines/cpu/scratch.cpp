// Scratch memory, and what threads keep of it.
#include "engines/cpu/scratch.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <utility>

namespace headway::cpu {
namespace {

// What a thread keeps at most, by owner: as many threads have a task as there are workers, few make calls.
constexpr std::int64_t most_kept[] = {std::int64_t{8} << 20, std::int64_t{64} << 20};

// Kernels walk through all of their scratch all the time. More than this on small pages does not fit the first-level
// TLB, and one huge page is as good for little as for much.
constexpr std::int64_t small_pages_bytes = std::int64_t{256} << 10;
constexpr std::int64_t huge_page_bytes = std::int64_t{2} << 20;

// For a few instructions. A thread that finds it taken goes without, so that a fork in between blocks nobody.
class TryLock {
 public:
  explicit TryLock(std::atomic<bool>& taken) noexcept
      : taken_(taken), is_ours_(!taken.exchange(true, std::memory_order_acquire)) {}
  ~TryLock() {
    if (is_ours_) {
      taken_.store(false, std::memory_order_release);
    }
  }
  TryLock(const TryLock&) = delete;
  TryLock& operator=(const TryLock&) = delete;
  explicit operator bool() const { return is_ours_; }

 private:
  std::atomic<bool>& taken_;
  bool is_ours_;
};

}  // namespace

// What a thread keeps for one kind of owner; release() may empty it from another thread.
struct KeptMemory::Block {
  std::atomic<bool> taken{false};
  Memory memory;
  std::int64_t bytes = 0;

  std::int64_t clear() {
    const TryLock lock(taken);
    if (!lock) {
      return 0;
    }
    memory.reset();
    return std::exchange(bytes, 0);
  }
};

// A thread that keeps memory. One whose thread has ended is used again.
struct KeptMemory::Thread {
  Block blocks[2];
  std::atomic<bool> used{false};
  Thread* next = nullptr;
};

// Room for as many threads as nearly every process has, and a list of those beyond. It is never destroyed: threads may
// outlive it.
struct KeptMemory::Threads {
  static constexpr int most_early = 512;
  union {
    Thread early[most_early];
  };
  std::atomic<Thread*> later{nullptr};

  constexpr Threads() : early() {}
  ~Threads() {}

  template <class Body>
  void for_each(const Body& body) {
    for (Thread& one : early) {
      if (body(one)) {
        return;
      }
    }
    for (Thread* one = later.load(std::memory_order_acquire); one != nullptr; one = one->next) {
      if (body(*one)) {
        return;
      }
    }
  }
};
constinit KeptMemory::Threads KeptMemory::threads;

// A free entry, or a new one at the head of the list; null without memory for it.
KeptMemory::Thread* KeptMemory::thread() noexcept {
  Thread* found = nullptr;
  threads.for_each([&](Thread& one) {
    found = one.used.exchange(true, std::memory_order_acquire) ? nullptr : &one;
    return found != nullptr;
  });
  if (found == nullptr) {
    found = new (std::nothrow) Thread;
    if (found != nullptr) {
      found->used = true;
      found->next = threads.later.load(std::memory_order_relaxed);
      while (!threads.later.compare_exchange_weak(found->next, found, std::memory_order_release,
                                                  std::memory_order_relaxed)) {
      }
    }
  }
  return found;
}

// Null when the thread has destroyed what it kept: static destructors and other thread_locals may still make calls.
KeptMemory::Block* KeptMemory::kept(Owner owner) noexcept {
  constinit static thread_local bool ended = false;  // without a destructor, so there to the end
  struct Entry {
    Thread* thread = KeptMemory::thread();
    ~Entry() {
      ended = true;
      if (thread != nullptr) {
        for (Block& block : thread->blocks) {
          block.clear();
        }
        thread->used.store(false, std::memory_order_release);
      }
    }
  };
  if (ended) {
    return nullptr;
  }
  static thread_local Entry entry;
  return entry.thread == nullptr ? nullptr : &entry.thread->blocks[static_cast<int>(owner)];
}

std::int64_t KeptMemory::release() noexcept {
  std::int64_t bytes = 0;
  threads.for_each([&](Thread& one) {
    for (Block& block : one.blocks) {
      bytes += block.clear();
    }
    return false;
  });
  return bytes;
}

KeptMemory::KeptMemory(Owner owner) noexcept : owner_(owner) {
  if (Block* own = kept(owner); own != nullptr) {
    if (const TryLock lock(own->taken); lock) {
      memory_ = std::move(own->memory);
      bytes_ = std::exchange(own->bytes, 0);
    }
  }
}

KeptMemory::~KeptMemory() {
  if (exact_blocks || bytes_ > most_kept[static_cast<int>(owner_)]) {
    return;
  }
  if (Block* own = kept(owner_); own != nullptr) {
    if (const TryLock lock(own->taken); lock && bytes_ > own->bytes) {
      own->memory = std::move(memory_);
      own->bytes = bytes_;
    }
  }
}

void* KeptMemory::at_least(std::int64_t bytes) {
  if (bytes_ < bytes || exact_blocks) {
    const bool rounds = !exact_blocks && bytes > small_pages_bytes;
    const std::int64_t wanted = rounds ? std::max(bytes, huge_page_bytes) : bytes;
    bytes_ = 0;
    memory_.reset();
    memory_ = owned_memory(static_cast<std::size_t>(wanted));
    if (memory_ == nullptr) {
      throw std::bad_alloc();
    }
    bytes_ = wanted;
  }
  return memory_.get();
}

}  // namespace headway::cpu
