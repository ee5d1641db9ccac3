// Threads that cannot start, pinned callers, and callers that find the pool in use.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "core/parallel.h"
#include "refusals.h"
#include "support.h"

namespace headway::test {
namespace {

long threads_of_process() {
  using std::filesystem::directory_iterator;
  return std::distance(directory_iterator("/proc/self/task"), directory_iterator());
}

int blocked_signals() {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  int blocked = 0;
  for (int signal = 1; signal < 32; ++signal) {
    blocked += sigismember(&mask, signal);
  }
  return blocked;
}

// In a child whose pool has not started yet: a call with something refused, then one without. 0: all is well; 10: that,
// and nothing was refused.
int first_call_with(Refused kind, long nth, HowOften how_often, const Tensor& q, const Tensor& expected) {
  return in_child([&] {
    Tensor out(q.sizes());
    const int blocked = blocked_signals();
    bool happened = false, ended = true;
    {
      const Refusal refusal(kind, nth, how_often);
      try {
        attention(q, q, q, out);
      } catch (const OutOfMemory&) {
        ended = false;
      }
      happened = refusal.happened();
    }
    if (ended && !same_bits(out, expected)) return 1;
    if (!ended && kind != Refused::memory) return 2;
    if (blocked_signals() != blocked) return 3;
    std::memset(out.data(), 0, bytes_of(out).size());
    attention(q, q, q, out);
    if (!same_bits(out, expected)) return 4;
    if (threads_of_process() != get_threads()) return 5;
    return happened ? 0 : 10;
  });
}

TEST(ThreadsThatCannotStart, cost_neither_the_call_nor_signals_nor_the_next_calls_threads) {
  const ThreadCount four(4);
  const Tensor q = numbers({1, 4, 300, 32});
  Tensor expected(q.sizes());
  attention(q, q, q, expected);
  for (const HowOften how_often : {HowOften::once, HowOften::from_then_on}) {
    for (long nth = 0; nth < 3; ++nth) {
      EXPECT_EQ(first_call_with(Refused::threads, nth, how_often, q, expected), 0) << nth;
    }
  }
}

TEST(ThreadsThatCannotStart, for_want_of_memory_are_there_for_the_next_call) {
  const ThreadCount four(4);
  const Tensor q = numbers({1, 4, 300, 32});
  Tensor expected(q.sizes());
  attention(q, q, q, expected);
  for (const HowOften how_often : {HowOften::once, HowOften::from_then_on}) {
    int found = 0;
    for (long nth = 0; found == 0; ++nth) {
      found = first_call_with(Refused::memory, nth, how_often, q, expected);
      EXPECT_TRUE(found == 0 || (found == 10 && nth > 5)) << found << ", allocation " << nth;
    }
  }
}

TEST(Threads, of_a_pinned_caller_run_wherever_the_process_may) {
  const cpu_set_t process = [] {
    cpu_set_t cpus;
    return sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? cpus : cpu_set_t{};
  }();
  if (CPU_COUNT(&process) < 2) {
    GTEST_SKIP() << "needs two CPUs";
  }
  const int status = in_child([&] {
    std::atomic<bool> ends{false};
    std::thread other([&] { ends.wait(false); });  // of the process, and not pinned
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    std::atomic<int> most{0};
    parallel_for(2000, 2, [&](std::int64_t, int worker) {
      cpu_set_t own;
      if (worker > 0 && sched_getaffinity(0, sizeof own, &own) == 0) {
        cpu_set_t elsewhere;
        CPU_XOR(&elsewhere, &own, &one);
        most = std::max(most.load(), CPU_COUNT(&elsewhere));
      }
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
      while (most == 0 && std::chrono::steady_clock::now() < end) {
        sched_yield();
      }
    });
    ends = true;
    ends.notify_all();
    other.join();
    return most > 0 ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
}

TEST(Threads, help_a_call_that_found_them_busy_as_soon_as_they_are_free) {
  std::atomic<bool> second_runs{false}, first_runs{false}, helped{false};
  std::thread first([&] {
    parallel_for(2, 2, [&](std::int64_t, int) {
      first_runs = true;
      first_runs.notify_all();
      second_runs.wait(false);
    });
  });
  first_runs.wait(false);
  std::atomic<std::int64_t> done{0};
  parallel_for(3000, 2, [&](std::int64_t, int worker) {
    second_runs = true;
    second_runs.notify_all();
    helped = helped || worker > 0;
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
         !helped && std::chrono::steady_clock::now() < end;) {
      sched_yield();
    }
    ++done;
  });
  first.join();
  EXPECT_TRUE(helped);
  EXPECT_EQ(done, 3000);
}

}  // namespace
}  // namespace headway::test
