// One line on a terminal that shows the progress of the work; silent in a pipe, and for work that ends at once.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "headway/attention.h"

namespace headway::cli {

class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();  // wipes the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // For AttentionOptions::progress; stops the work after an interrupt. The line must outlive the call.
  Progress callback();

 private:
  using Clock = std::chrono::steady_clock;

  void show(double share);
  void draw(const std::string& line);

  bool on_terminal_;
  Clock::time_point start_;
  std::string shown_;
};

}  // namespace headway::cli
