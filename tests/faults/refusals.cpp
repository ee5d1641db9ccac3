#include "refusals.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

namespace headway::test {
namespace {

constexpr long nothing = -1;
std::atomic<int> refused_kind{static_cast<int>(Refused::memory)};
std::atomic<long> first_refused{nothing}, asked{0}, refused{0}, blocks{0};
std::atomic<bool> repeats{false};

bool refuses(Refused what) {
  const long nth = first_refused.load();
  if (nth == nothing || refused_kind.load() != static_cast<int>(what)) {
    return false;
  }
  const long number = asked.fetch_add(1);
  const bool no = number == nth || (number > nth && repeats.load());
  refused.fetch_add(no ? 1 : 0);
  return no;
}

}  // namespace

Refusal::Refusal(Refused what, long nth, HowOften how_often) {
  refused_kind = static_cast<int>(what);
  asked = refused = 0;
  repeats = how_often == HowOften::from_then_on;
  first_refused = nth;
}

Refusal::~Refusal() { first_refused = nothing; }

bool Refusal::happened() const { return refused.load() > 0; }

long live_blocks() { return blocks.load(); }

}  // namespace headway::test

using headway::test::Refused;
using headway::test::refuses;

void* operator new(std::size_t bytes) {
  void* memory = refuses(Refused::memory) ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  ++headway::test::blocks;
  return memory;
}

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void operator delete(void* memory) noexcept {
  if (memory != nullptr) {
    --headway::test::blocks;
    std::free(memory);
  }
}

void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

extern "C" {

void* __real_aligned_alloc(std::size_t alignment, std::size_t bytes);
void* __wrap_aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return refuses(Refused::memory) ? nullptr : __real_aligned_alloc(alignment, bytes);
}

int __real_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes);
int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  return refuses(Refused::memory) ? ENOMEM : __real_posix_memalign(memory, alignment, bytes);
}

void* __real_mmap(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset);
void* __wrap_mmap(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset) {
  errno = ENOMEM;
  return refuses(Refused::memory) ? MAP_FAILED : __real_mmap(address, bytes, protection, flags, file, offset);
}

int __real_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument);
int __wrap_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  return refuses(Refused::threads) ? EAGAIN : __real_pthread_create(thread, attributes, start, argument);
}

}  // extern "C"
