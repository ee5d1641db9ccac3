// Texts that the command prints, and its own two kinds of failure.
#pragma once

#include <chrono>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace headway::cli {

// An invalid request: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A request that failed: exit code 1.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class ExitCode { success = 0, failure = 1, usage = 2, signalled = 128 };

// A failure of all ranks of a job, which one of them has reported.
class AlreadyReported : public std::runtime_error {
 public:
  explicit AlreadyReported(ExitCode exit_code) : runtime_error("already reported"), code(exit_code) {}
  ExitCode code;
};

// text("expected ", 3, " numbers") == "expected 3 numbers"
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return std::move(stream).str();
}

// The library's error texts start with its own operation ("load_npy: q.npy: ..."); here the user knows the command
// instead.
std::string_view without_operation(std::string_view library_text);

std::string duration_text(std::chrono::duration<double> duration);  // 12.3 ms, 4.56 s

}  // namespace headway::cli
