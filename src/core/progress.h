// Reports progress to the caller now and then, and stops the work when the caller says so.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string_view>

#include "core/text.h"
#include "headway/attention.h"

namespace headway {

// Reports a part of the work as the share [begin, end] of the whole; empty if no progress was asked for.
inline Progress part_of(const Progress& whole, double begin, double end) {
  if (!whole) {
    return {};
  }
  return [&whole, begin, end](double share) { return whole(begin + share * (end - begin)); };
}

class ProgressMeter {
 public:
  ProgressMeter(std::string_view operation, const Progress& progress, std::int64_t steps)
      : operation_(operation), progress_(progress), steps_(steps), last_report_(Clock::now()) {}

  // One of the steps is done.
  void advance() { advance_to(done_ + 1); }

  void advance_to(std::int64_t done) {
    const bool ends = done == steps_ && done_ != steps_;
    done_ = done;
    if (progress_ && (ends || Clock::now() - last_report_ >= interval)) {
      report();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds interval{50};

  void report() {
    last_report_ = Clock::now();
    if (!progress_(static_cast<double>(done_) / static_cast<double>(steps_))) {
      throw Cancelled(text(operation_, ": cancelled by the caller after ", done_, " of ", steps_, " steps"));
    }
  }

  std::string_view operation_;
  const Progress& progress_;
  std::int64_t steps_;
  std::int64_t done_ = 0;
  Clock::time_point last_report_;
};

// The same for tasks on several threads: all of them count, the calling thread (worker 0) reports.
class SharedProgress {
 public:
  SharedProgress(std::string_view operation, const Progress& progress, std::int64_t tasks)
      : meter_(operation, progress, tasks) {}

  // On the calling thread, when all tasks are done.
  void finish() { meter_.advance_to(done_.load(std::memory_order_relaxed)); }

  void task_done(int worker) {
    const std::int64_t done = done_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (worker == 0) {
      meter_.advance_to(done);
    }
  }

 private:
  ProgressMeter meter_;
  std::atomic<std::int64_t> done_{0};
};

}  // namespace headway
