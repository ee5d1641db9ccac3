// The thread pool and its settings.
#include "core/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "core/process.h"
#include "core/text.h"
#include "headway/error.h"
#include "headway/threads.h"

namespace headway {
namespace {

struct Job {
  TaskFunction task;
  std::int64_t count;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;

  // Takes the next task; false when none is left.
  bool work_once(int worker) {
    const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
    if (i >= count || failed.load(std::memory_order_relaxed)) {
      return false;
    }
    try {
      task(i, worker);
    } catch (...) {
      if (!failed.exchange(true)) {
        error = std::current_exception();
      }
    }
    return true;
  }
  void work(int worker) {
    while (work_once(worker)) {
    }
  }
};

// While a thread is inside a task, calls that it makes run on it alone.
thread_local bool inside_task = false;

class InsideTask {
 public:
  InsideTask() { inside_task = true; }
  ~InsideTask() { inside_task = false; }
  InsideTask(const InsideTask&) = delete;
  InsideTask& operator=(const InsideTask&) = delete;
};

// Threads started while one of these exists block all signals, so that the user's own threads handle them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins for some tens of microseconds, then sleeps until the value changes.
template <class T>
void wait_while_equal(const std::atomic<T>& value, T old) {
  constexpr int spins = 4000;
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) {
      return;
    }
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

// A job on an executor's threads: the first to arrive take part. The calling thread is worker 0, which reports
// progress, whenever it arrives.
struct LentJob {
  Job& job;
  int threads;
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> helpers{0};
};

class Pool;
std::atomic<Pool*> current_pool{nullptr};

// Never destroyed: its threads are detached and may sleep in it while the process ends.
class Pool {
 public:
  // Does what is left of a job, on as many threads as the system grants.
  void run(Job& job, int threads) {
    start_workers(threads - 1);
    callers_cpu_ = sched_getcpu();
    if (avoided_cpu_ >= 0 && avoided_cpu_ != callers_cpu_) {
      keep_workers_off(callers_cpu_);
    }
    on_callers_cpu_.store(false, std::memory_order_relaxed);
    const auto helpers = static_cast<std::uint64_t>(threads - 1);
    job_ = &job;
    finished_.store(0, std::memory_order_relaxed);
    const std::uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(generation << 32 | helpers, std::memory_order_release);
    ticket_.notify_all();
    bool watching = avoided_cpu_ != callers_cpu_;
    const auto begin = Clock::now();
    while (job.work_once(0)) {
      const bool crowded = watching && on_callers_cpu_.load(std::memory_order_relaxed);
      if (crowded || (watching && Clock::now() - begin > patience)) {
        watching = false;
        if (crowded || (ticket_.load(std::memory_order_relaxed) & 0xffffffffu) != 0) {
          keep_workers_off(sched_getcpu());
        }
      }
    }
    if (current_pool.load(std::memory_order_relaxed) != this) {  // a callback forked, and this is the child
      throw Unsupported("a call cannot continue in a forked child: the threads that run it belong to the parent");
    }
    // No task is left: workers that have not started yet skip this job, the others must have ended.
    const std::uint64_t closed = ticket_.exchange(generation << 32, std::memory_order_acq_rel);
    const auto came = static_cast<std::uint32_t>(helpers - (closed & 0xffffffffu));
    for (std::uint32_t done = finished_.load(std::memory_order_acquire); done != came;
         done = finished_.load(std::memory_order_acquire)) {
      wait_while_equal(finished_, done);
    }
  }

  std::mutex in_use;

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds patience{100};  // several times what waking a thread takes

  // Moves the workers off the calling thread's CPU. In a virtual machine the scheduler may take idle CPUs for busy
  // ones, and wake a worker on the CPU of the thread that wakes it; the two then share that CPU for milliseconds while
  // another is idle. Done when that is detected or a worker is late, and from then on whenever the caller has moved.
  void keep_workers_off(int cpu) {
    cpu_set_t others = allowed_;
    if (cpu >= 0 && cpu < CPU_SETSIZE) {
      CPU_CLR(cpu, &others);
    }
    if (CPU_COUNT(&others) > 0) {
      for (const pthread_t worker : handles_) {
        pthread_setaffinity_np(worker, sizeof others, &others);
      }
    }
    avoided_cpu_ = cpu;
  }

  // Starts the missing workers, as many as the system grants; a later call tries again. Places in a job that no worker
  // takes are closed when the tasks run out. The calling thread may be pinned; workers may run on every CPU of the
  // process.
  void start_workers(int wanted) noexcept {
    const auto count = static_cast<std::size_t>(wanted);
    if (handles_.size() >= count) {
      return;
    }
    try {
      handles_.reserve(count);
    } catch (const std::bad_alloc&) {
      return;
    }
    stay_loaded();
    allowed_ = process_cpus();
    avoided_cpu_ = -1;
    const SignalsBlocked blocked;
    pthread_t worker;
    while (handles_.size() < count && pthread_create(&worker, nullptr, serve, this) == 0) {
      pthread_detach(worker);
      if (CPU_COUNT(&allowed_) > 0) {
        pthread_setaffinity_np(worker, sizeof allowed_, &allowed_);
      }
      handles_.push_back(worker);
    }
  }

  static void* serve(void* pool) { static_cast<Pool*>(pool)->serve(); }

  // A worker takes one of the places that a ticket offers; the place is its number in the job.
  [[noreturn]] void serve() {
    std::uint64_t seen = 0;
    for (;;) {
      std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
      if (ticket >> 32 == seen || (ticket & 0xffffffffu) == 0) {
        wait_while_equal(ticket_, ticket);
        continue;
      }
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) {
        continue;
      }
      seen = ticket >> 32;
      inside_task = true;
      if (sched_getcpu() == callers_cpu_) {
        on_callers_cpu_.store(true, std::memory_order_relaxed);
      }
      job_->work(static_cast<int>(ticket & 0xffffffffu));
      finished_.fetch_add(1, std::memory_order_acq_rel);
      finished_.notify_one();
    }
  }

 public:
  Job* job_ = nullptr;
  std::atomic<std::uint64_t> ticket_{0};  // generation in the high half, places still open in the low half
  std::atomic<std::uint32_t> finished_{0};
  std::vector<pthread_t> handles_;
  cpu_set_t allowed_{};   // to the process; empty if the system does not say
  int avoided_cpu_ = -1;  // the CPU that the workers are kept from
  int callers_cpu_ = -1;
  std::atomic<bool> on_callers_cpu_{false};  // a worker of this job woke on the caller's CPU
};

std::atomic<Executor> program_executor{nullptr};

// A forked child has none of its parent's threads, and perhaps a pool that was in use: it gets a new one.
void forget_threads() {
  current_pool.store(nullptr, std::memory_order_relaxed);
  program_executor.store(nullptr, std::memory_order_relaxed);
}

// Registers the fork handler, once it succeeds; registering it twice is harmless.
bool watch_forks() {
  static std::atomic<bool> watching{false};
  if (!watching.load(std::memory_order_relaxed)) {
    watching.store(pthread_atfork(nullptr, nullptr, forget_threads) == 0, std::memory_order_relaxed);
  }
  return watching.load(std::memory_order_relaxed);
}

// Null if there is no memory for one.
Pool* pool() {
  Pool* existing = current_pool.load(std::memory_order_acquire);
  if (existing != nullptr || !watch_forks()) {
    return existing;
  }
  auto* made = new (std::nothrow) Pool;
  if (current_pool.compare_exchange_strong(existing, made, std::memory_order_acq_rel)) {
    return made;
  }
  delete made;
  return existing;
}

void take_part(void* context) {
  auto& lent_job = *static_cast<LentJob*>(context);
  const bool called = std::this_thread::get_id() == lent_job.caller;
  if (const int worker = called ? 0 : 1 + lent_job.helpers.fetch_add(1, std::memory_order_relaxed);
      worker < lent_job.threads) {
    const InsideTask inside;
    lent_job.job.work(worker);
  }
}

void run_shared(Pool& shared, Job& job, int threads) {
  if (const Executor executor = program_executor.load(std::memory_order_acquire); executor != nullptr) {
    LentJob lent_job{job, threads};
    executor(take_part, &lent_job);
  } else {
    const InsideTask inside;
    shared.run(job, threads);
  }
}

constexpr long most_threads = 4096;  // from the environment

int default_threads() {
  if (const char* value = std::getenv("HEADWAY_THREADS"); value != nullptr && *value != '\0') {
    char* end = nullptr;
    errno = 0;
    const long threads = std::strtol(value, &end, 10);
    if (*end != '\0' || threads < 1 || errno != 0) {
      throw InvalidArgument(text("HEADWAY_THREADS: expected 1 or more, found ", value));
    }
    return static_cast<int>(std::min(threads, most_threads));
  }
  // OMP_NUM_THREADS may be a list; anything but a positive number is ignored.
  if (const char* value = std::getenv("OMP_NUM_THREADS"); value != nullptr && std::atol(value) > 0) {
    return static_cast<int>(std::min(std::atol(value), most_threads));
  }
  const cpu_set_t allowed = process_cpus();
  const int cpus = CPU_COUNT(&allowed);
  return cpus > 0 ? cpus : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::atomic<int> thread_setting{0};  // 0: not determined yet

}  // namespace

int get_threads() {
  int threads = thread_setting.load(std::memory_order_relaxed);
  if (threads == 0) {
    const int found = default_threads();
    threads = thread_setting.compare_exchange_strong(threads, found, std::memory_order_relaxed) ? found : threads;
  }
  return threads;
}

void set_threads(int threads) {
  if (threads < 1) {
    throw InvalidArgument(text("set_threads: expected 1 or more, found ", threads));
  }
  thread_setting.store(threads, std::memory_order_relaxed);
}

void set_executor(Executor executor) {
  if (!watch_forks()) {
    throw OutOfMemory("set_executor: could not ask the system to be told of forks");
  }
  program_executor.store(executor, std::memory_order_release);
}

void parallel_for(std::int64_t count, int threads, TaskFunction task) {
  Job job{task, count};
  const int useful = static_cast<int>(std::min<std::int64_t>(count, threads));
  if (Pool* shared = useful > 1 && !inside_task ? pool() : nullptr; shared != nullptr) {
    // While another thread's call holds the pool, this one runs its tasks itself and tries again after each.
    std::unique_lock lock(shared->in_use, std::try_to_lock);
    while (!lock && job.work_once(0)) {
      static_cast<void>(lock.try_lock());
    }
    if (lock) {
      run_shared(*shared, job, useful);
    }
  }
  while (job.work_once(0)) {  // all tasks, or those that are left, perhaps none
  }
  if (job.error) {
    std::rethrow_exception(job.error);
  }
}

}  // namespace headway
