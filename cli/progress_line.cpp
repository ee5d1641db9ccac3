// One line on a terminal that shows the progress of the work.
#include "progress_line.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iostream>

#include "interrupt.h"
#include "text.h"

namespace headway::cli {
namespace {

constexpr std::chrono::milliseconds quiet_time{300};
constexpr int bar_width = 30;
constexpr int echoed_ctrl_c = 2;  // the terminal echoes ^C after the line

}  // namespace

ProgressLine::ProgressLine() : on_terminal_(::isatty(STDERR_FILENO) == 1), start_(Clock::now()) {}

ProgressLine::~ProgressLine() {
  if (!shown_.empty()) {
    std::cerr << '\r' << std::string(shown_.size() + echoed_ctrl_c, ' ') << '\r' << std::flush;
  }
}

Progress ProgressLine::callback() {
  return [this](double share) {
    show(share);
    return interrupted_by() == 0;
  };
}

void ProgressLine::show(double share) {
  const std::chrono::duration<double> elapsed = Clock::now() - start_;
  if (!on_terminal_ || elapsed < quiet_time || !(share > 0)) {
    return;
  }
  const int filled = std::clamp(static_cast<int>(share * bar_width), 0, bar_width);
  const double left = std::ceil(elapsed.count() / share - elapsed.count());
  draw(text('[', std::string(static_cast<std::size_t>(filled), '#'),
            std::string(static_cast<std::size_t>(bar_width - filled), '.'), "] ", std::setw(3),
            static_cast<int>(share * 100), " %  ", std::fixed, std::setprecision(0), left, " s left"));
}

void ProgressLine::draw(const std::string& line) {
  if (line == shown_) {
    return;
  }
  // A shorter line must overwrite what is left of a longer one.
  const std::size_t rest = shown_.size() > line.size() ? shown_.size() - line.size() : 0;
  std::cerr << '\r' << line << std::string(rest, ' ') << std::flush;
  shown_ = line + std::string(rest, ' ');
}

}  // namespace headway::cli
