#include "fuzz/child.h"

#include <gtest/gtest-spi.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "headway/threads.h"

namespace headway::test::fuzz {
namespace {

constexpr unsigned seconds_of_a_case = 120;

// What a child tells the process that waits for it.
struct Report {
  std::atomic<std::size_t> current{0};  // the case it is at
  std::atomic<std::int64_t> refused{0}, comparisons{0};
  std::atomic<bool> failed{false};
  char check[200] = {};
  char text[2000] = {};

  void fail(const Failure& failure) {
    std::snprintf(check, sizeof check, "%s", failure.check.c_str());
    std::snprintf(text, sizeof text, "%s", failure.text.c_str());
    failed = true;
  }
};

// What the support library expects by EXPECT_TRUE (margins on a device) is a finding too.
std::optional<Failure> checked(const Prepared& prepared, Engine engine) {
  testing::TestPartResultArray results;
  std::optional<Failure> found;
  {
    testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    found = check(prepared, engine);
  }
  for (int n = 0; !found && n < results.size(); ++n)
    if (results.GetTestPartResult(n).failed()) found = Failure{"surroundings", results.GetTestPartResult(n).message()};
  return found;
}

void run_in_child(const Batch& batch, std::size_t begin, const Target& target, Report& report,
                  const std::function<bool()>& stopped) {
  if (!target.isa.empty()) setenv("HEADWAY_ISA", target.isa.c_str(), 1);
  set_threads(1);
  const std::int64_t before = comparisons();
  for (std::size_t n = begin; n < batch.size() && !stopped(); ++n) {
    report.current = n;
    alarm(seconds_of_a_case);
    try {
      if (const auto found = checked(*batch[n], target.engine)) return report.fail(*found);
    } catch (const Unsupported& error) {
      if (target.engine == Engine::reference) return report.fail({"refusal", error.what()});
      ++report.refused;
    } catch (const std::exception& error) {
      return report.fail({"exception", error.what()});
    }
    report.comparisons = comparisons() - before;
  }
  report.current = batch.size();
}

}  // namespace

BatchResult run_batch(const Batch& batch, std::size_t begin, const Target& target, bool batch_invariant,
                      const std::function<bool()>& stopped) {
  Shared<Report> report;
  report->current = begin;
  for (std::size_t n = begin; n < batch.size(); ++n) batch[n]->materials.call.options.batch_invariant = batch_invariant;
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::bad_alloc();
  if (child == 0) {
    run_in_child(batch, begin, target, *report, stopped);
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  BatchResult result{report->current, report->refused, report->comparisons, {}};
  if (report->failed) {
    result.verdict = {true, false, {report->check, report->text}};
  } else if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) {
    result.verdict = {true, false, {"hang", "no end after " + std::to_string(seconds_of_a_case) + " seconds"}};
  } else if (WIFSIGNALED(status)) {
    result.verdict = {true, false, {"crash", "signal " + std::to_string(WTERMSIG(status))}};
  } else if (WEXITSTATUS(status) != 0) {
    result.verdict = {true, false, {"crash", "exit code " + std::to_string(WEXITSTATUS(status))}};
  }
  return result;
}

}  // namespace headway::test::fuzz
