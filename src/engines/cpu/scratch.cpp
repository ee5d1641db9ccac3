// Scratch memory, and the part of it that threads keep.
#include "engines/cpu/scratch.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <utility>

namespace headway::cpu {
namespace {

// The most memory that a thread keeps, by owner: every worker runs tasks, but few threads make calls.
constexpr std::int64_t most_kept[] = {std::int64_t{8} << 20, std::int64_t{64} << 20};

// Kernels access all of their scratch continuously. More than this on small pages does not fit the first-level TLB, so
// larger scratch uses huge pages.
constexpr std::int64_t small_pages_bytes = std::int64_t{256} << 10;
constexpr std::int64_t huge_page_bytes = std::int64_t{2} << 20;

// Held for a few instructions. A thread that finds it taken does not wait, so a fork while it is held blocks no thread.
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

// The memory that a thread keeps for one kind of owner; release() may free it from another thread.
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

// Entries for as many threads as nearly every process has, and a list of further ones. Never destroyed, since threads
// may outlive static objects.
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

// Null after the thread has destroyed its entry: static destructors and other thread_locals may still make calls.
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
