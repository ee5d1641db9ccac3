// Reports progress to the caller now and then, and stops the work when the caller says so.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

#include "core/text.h"
#include "headway/attention.h"

namespace headway {

class ProgressMeter {
 public:
  ProgressMeter(std::string_view operation, const Progress& progress, std::int64_t steps)
      : operation_(operation), progress_(progress), steps_(steps), last_report_(Clock::now()) {}

  // One of the steps is done.
  void advance() {
    ++done_;
    if (progress_ && (done_ == steps_ || Clock::now() - last_report_ >= interval)) {
      report();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds interval{50};

  void report() {
    last_report_ = Clock::now();
    if (!progress_(static_cast<double>(done_) / static_cast<double>(steps_))) {
      throw Cancelled(text(operation_, ": cancelled by the caller after ", done_, " of ", steps_, " rows"));
    }
  }

  std::string_view operation_;
  const Progress& progress_;
  std::int64_t steps_;
  std::int64_t done_ = 0;
  Clock::time_point last_report_;
};

}  // namespace headway
