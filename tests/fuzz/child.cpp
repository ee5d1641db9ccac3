#include "fuzz/child.h"

#include <gtest/gtest-spi.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>

#include "engines/cpu/kernels.h"
#include "headway/threads.h"

namespace headway::test::fuzz {
namespace {

constexpr unsigned seconds_of_a_case = 120;

// What the support library expects by EXPECT_TRUE (margins on a device) is a finding too.
std::optional<Failure> checked(const Prepared& prepared, const Target& target) {
  testing::TestPartResultArray results;
  std::optional<Failure> found;
  {
    testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    found = check(prepared, target.engine, target.batch_invariant);
  }
  for (int n = 0; !found && n < results.size(); ++n)
    if (results.GetTestPartResult(n).failed()) found = Failure{"surroundings", results.GetTestPartResult(n).message()};
  return found;
}

void choose_isa(const Target& target) {
  static const std::vector<const cpu::Kernels*> available = cpu::available_kernels();
  for (const cpu::Kernels* kernels : available)
    if (target.isa == kernels->name) cpu::choose_kernels(*kernels);
}

// Runs `work` in a child and returns how it ended.
int run_in_child(const std::function<void()>& work) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::bad_alloc();
  if (child == 0) {
    work();
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

struct Report {
  std::atomic<std::size_t> current{0};  // the case it is at
  std::atomic<std::int64_t> refused{0};
  SharedFailure failure;
};

Verdict verdict_of(const SharedFailure& failure, int status) {
  if (failure) return {true, false, failure.get()};
  if (const auto found = failure_of_process(status)) return {true, false, *found};
  return {};
}

}  // namespace

void SharedFailure::set(const Failure& failure) {
  std::snprintf(check_, sizeof check_, "%s", failure.check.c_str());
  std::snprintf(text_, sizeof text_, "%s", failure.text.c_str());
  is_set_ = true;
}

Verdict run_here(const Prepared& prepared, const Target& target) {
  choose_isa(target);
  set_threads(1);
  alarm(seconds_of_a_case);
  try {
    if (const auto found = checked(prepared, target)) return {true, false, *found};
  } catch (const Unsupported& error) {
    if (target.engine == Engine::reference) return {true, false, {"refusal", error.what()}};
    return {false, true, {}};
  } catch (const std::exception& error) {
    return {true, false, {"exception", error.what()}};
  }
  return {};
}

std::optional<Failure> failure_of_process(int status) {
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
    return Failure{"hang", "no end after " + std::to_string(seconds_of_a_case) + " seconds"};
  if (WIFSIGNALED(status)) return Failure{"crash", "signal " + std::to_string(WTERMSIG(status))};
  if (WEXITSTATUS(status) != 0) return Failure{"crash", "exit code " + std::to_string(WEXITSTATUS(status))};
  return std::nullopt;
}

Verdict judge(const Prepared& prepared, const Target& target) {
  if (!prepared.rejected.empty()) return {};
  Shared<Report> report;
  const int status = run_in_child([&] {
    const Verdict verdict = run_here(prepared, target);
    if (verdict.failed) report->failure.set(verdict.failure);
    report->refused = verdict.refused;
  });
  Verdict verdict = verdict_of(report->failure, status);
  verdict.refused = report->refused > 0;
  return verdict;
}

BatchResult run_batch(const Batch& batch, std::size_t begin, const Target& target) {
  Shared<Report> report;
  report->current = begin;
  const int status = run_in_child([&] {
    for (std::size_t n = begin; n < batch.size(); report->current = ++n) {
      const Verdict verdict = run_here(*batch[n], target);
      report->refused += verdict.refused;
      if (verdict.failed) return report->failure.set(verdict.failure);
    }
  });
  return {report->current, report->refused, verdict_of(report->failure, status)};
}

}  // namespace headway::test::fuzz
