// The number of threads: it changes no bit, it must be positive, and several callers may share the library. Threads may
// be lent.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/parallel.h"
#include "headway/headway.h"

namespace headway::test {
namespace {

// Numbers that look random and repeat.
Tensor numbers(const Dims& sizes, DType dtype, double phase) {
  Tensor result(sizes, DType::f64);
  for (std::int64_t n = 0; n < result.elements(); ++n) {
    result.as<double>()[n] =
        std::sin(phase + 12.9898 * static_cast<double>(n % 9973) * (1 + static_cast<double>(n % 7)));
  }
  return convert(result, dtype);
}

struct Everything {
  Tensor out, lse, dq, dk, dv, dbias, dsinks;
};

// One head of one long sequence, and two short batch items, with options that use every kind of tile.
Everything compute(const Dims& query, const Dims& key, DType dtype) {
  const Tensor q = numbers(query, dtype, 1), k = numbers(key, dtype, 2), v = numbers(key, dtype, 3);
  const Tensor bias = numbers({1, 1, query[2], key[2]}, DType::f32, 4), sinks = numbers({query[1]}, DType::f32, 5);
  const DType lse_type = dtype == DType::f64 ? DType::f64 : DType::f32;
  Everything all{Tensor(query, dtype), Tensor({query[0], query[1], query[2]}, lse_type),
                 Tensor(query, dtype), Tensor(key, dtype),
                 Tensor(key, dtype),   Tensor({1, 1, query[2], key[2]}),
                 Tensor({query[1]})};
  const AttentionOptions options{
      .bias = bias, .causal = Causal::bottom_right, .sinks = sinks, .dropout = 0.2, .seed = 9, .engine = Engine::cpu};
  attention(q, k, v, all.out, options, {.lse = all.lse});
  attention_backward(numbers(query, dtype, 6), q, k, v, all.out, all.lse,
                     {.dq = all.dq, .dk = all.dk, .dv = all.dv, .dbias = all.dbias, .dsinks = all.dsinks}, options);
  return all;
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.elements()) * size_of(a.dtype())) == 0;
}

void expect_same_bits(const Everything& a, const Everything& b) {
  EXPECT_TRUE(same_bytes(a.out, b.out) && same_bytes(a.lse, b.lse));
  EXPECT_TRUE(same_bytes(a.dq, b.dq) && same_bytes(a.dk, b.dk) && same_bytes(a.dv, b.dv));
  EXPECT_TRUE(same_bytes(a.dbias, b.dbias) && same_bytes(a.dsinks, b.dsinks));
}

class Threads : public testing::Test {
 protected:
  ~Threads() override { set_threads(before_); }
  int before_ = get_threads();
};

TEST_F(Threads, however_many_give_the_same_bits) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const auto& [query, key] : {std::pair<Dims, Dims>{{1, 1, 700, 40}, {1, 1, 1100, 40}},
                                     std::pair<Dims, Dims>{{2, 4, 65, 33}, {2, 2, 70, 33}}}) {
      set_threads(1);
      const Everything alone = compute(query, key, dtype);
      for (int threads : {2, 3, 7, 16}) {
        SCOPED_TRACE(testing::Message() << threads << " threads, " << dtype);
        set_threads(threads);
        expect_same_bits(compute(query, key, dtype), alone);
      }
    }
  }
}

TEST_F(Threads, fewer_than_one_is_an_error_that_says_so) {
  for (int threads : {0, -3}) {
    try {
      set_threads(threads);
      FAIL();
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()), "set_threads: expected 1 or more, found " + std::to_string(threads));
    }
  }
}

TEST_F(Threads, of_the_caller_may_call_at_once) {
  set_threads(4);
  const Everything expected = compute({1, 2, 300, 32}, {1, 1, 300, 32}, DType::f32);
  std::vector<std::thread> callers;
  for (int n = 0; n < 16; ++n) {
    callers.emplace_back([&] { expect_same_bits(compute({1, 2, 300, 32}, {1, 1, 300, 32}, DType::f32), expected); });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
}

TEST_F(Threads, are_there_again_after_a_fork) {
  set_threads(3);
  const Everything expected = compute({1, 4, 300, 32}, {1, 4, 300, 32}, DType::f32);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Everything again = compute({1, 4, 300, 32}, {1, 4, 300, 32}, DType::f32);
    _exit(same_bytes(again.out, expected.out) && same_bytes(again.dk, expected.dk) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Whether tasks of half a millisecond get to run on two CPUs, within a second.
bool two_cpus_work() {
  std::set<int> cpus;
  std::mutex mutex;
  std::atomic<bool> found{false};
  parallel_for(2000, 2, [&](std::int64_t, int) {
    using Clock = std::chrono::steady_clock;
    for (const auto end = Clock::now() + std::chrono::microseconds(500); !found && Clock::now() < end;) {
    }
    const std::lock_guard lock(mutex);
    cpus.insert(sched_getcpu());
    found = cpus.size() >= 2;
  });
  return found;
}

void put_all_threads_on(int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    sched_setaffinity(std::stoi(task.path().filename().string()), sizeof one, &one);
  }
}

// Which a virtual machine may do to them. In a child, which has a pool of its own.
TEST_F(Threads, that_wake_on_the_callers_cpu_are_sent_to_another) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) {
    GTEST_SKIP() << "needs two CPUs";
  }
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    two_cpus_work();  // the workers are there, and may have been sent away from one CPU: not from both
    bool well = false;
    for (int cpu = 0, tried = 0; tried < 2 && !well; ++cpu) {
      if (CPU_ISSET(cpu, &allowed)) {
        put_all_threads_on(cpu);
        well = two_cpus_work();
        ++tried;
      }
    }
    _exit(well ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

std::atomic<int> lent_calls{0};

// Five threads of the test's own, the caller among them.
void on_five_threads(void (*work)(void*), void* context) {
  ++lent_calls;
  std::vector<std::thread> others;
  for (int n = 0; n < 4; ++n) {
    others.emplace_back(work, context);
  }
  work(context);
  for (std::thread& other : others) {
    other.join();
  }
}

class LentThreads : public Threads {
 protected:
  ~LentThreads() override { set_executor(nullptr); }
};

TEST_F(LentThreads, do_the_work_and_give_the_same_bits) {
  const Dims query = {1, 2, 300, 32}, key = {1, 1, 300, 32};
  const Everything expected = compute(query, key, DType::f32);
  lent_calls = 0;
  set_executor(on_five_threads);
  for (int threads : {2, 5, 9}) {
    set_threads(threads);
    expect_same_bits(compute(query, key, DType::f32), expected);
  }
  EXPECT_GE(lent_calls, 3);
  lent_calls = 0;
  set_threads(1);
  expect_same_bits(compute(query, key, DType::f32), expected);
  set_threads(5);
  set_executor(nullptr);
  expect_same_bits(compute(query, key, DType::f32), expected);
  EXPECT_EQ(lent_calls, 0);
}

TEST_F(LentThreads, are_at_most_as_many_as_asked_for) {
  set_executor(on_five_threads);
  std::atomic<int> most{0}, tasks{0};
  parallel_for(1000, 3, [&](std::int64_t, int worker) {
    ++tasks;
    for (int seen = most; seen < worker && !most.compare_exchange_weak(seen, worker);) {
    }
  });
  EXPECT_EQ(tasks, 1000);
  EXPECT_LT(most, 3);
}

// Python looks for Ctrl-C there, on its main thread.
TEST_F(LentThreads, report_progress_on_the_calling_thread) {
  set_executor(on_five_threads);
  const std::thread::id caller = std::this_thread::get_id();
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::atomic<bool> well{true};
    parallel_for(100, 5, [&](std::int64_t, int worker) {
      if ((worker == 0) != (std::this_thread::get_id() == caller)) {
        well = false;
      }
    });
    ASSERT_TRUE(well);
  }
}

TEST_F(LentThreads, pass_exceptions_on_and_run_inner_calls_alone) {
  set_executor(on_five_threads);
  lent_calls = 0;
  std::atomic<int> inner{0};
  parallel_for(8, 5, [&](std::int64_t, int) { parallel_for(10, 5, [&](std::int64_t, int) { ++inner; }); });
  EXPECT_EQ(inner, 80);
  EXPECT_EQ(lent_calls, 1);
  EXPECT_THROW(parallel_for(8, 5,
                            [](std::int64_t task, int) {
                              if (task == 3) {
                                throw InvalidArgument("three");
                              }
                            }),
               InvalidArgument);
}

TEST_F(LentThreads, are_not_a_forked_childs) {
  const Everything expected = compute({1, 4, 300, 32}, {1, 4, 300, 32}, DType::f32);
  set_executor(on_five_threads);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    lent_calls = 0;
    const Everything again = compute({1, 4, 300, 32}, {1, 4, 300, 32}, DType::f32);
    _exit(lent_calls == 0 && same_bytes(again.out, expected.out) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace headway::test
