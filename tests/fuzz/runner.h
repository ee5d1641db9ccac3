// Draws cases and runs them on engines and instruction sets, in a process for each core: a crash or a hang is a finding
// like any other, and the next process goes on behind it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fuzz/check.h"

namespace headway::test::fuzz {

// What a process runs a case on.
struct Target {
  Engine engine;
  std::string isa;  // of the CPU engine
  bool batch_invariant = false;
};
std::string name(const Target& target);

// The reference and the CPU engine with every instruction set of this machine; or only one engine.
std::vector<Target> targets(const std::string& engine = "");

struct Settings {
  std::uint64_t seed = 1;
  std::int64_t cases = INT64_MAX;  // at most
  double seconds = 60;             // at most
  int jobs = 2;                    // processes that draw cases
  int findings = 5;                // after so many it ends
  double shrink_seconds = 20;      // at most, to make a finding smaller
  bool progress = false;           // a line that changes, for a terminal
  std::vector<Target> targets;
  int targets_of_a_case = 2;  // drawn from those whose kernels differ for the case's type
};

struct Summary {
  std::int64_t cases = 0, rejected = 0, refused = 0;
  std::int64_t comparisons = 0;  // of a tensor with what it should be
  std::int64_t findings = 0;
  double seconds = 0;
  bool interrupted = false;
  std::string kinds;  // how many cases there were of each kind, a few lines
};

// Prints each finding, with the line that replays it after it was made smaller, to stdout.
Summary fuzz(const Settings& settings);

// One case on every target; prints what it finds and returns how many there are.
int replay(const Case& one, const Settings& settings);

// What a target says of a case, in a process of its own.
struct Verdict {
  bool failed = false, refused = false;
  Failure failure;
};
Verdict judge(const Prepared& prepared, const Target& target);

// The smallest case found within the seconds that still fails; and one that fails the same check on the target.
Case shrunk(const Case& one, const std::function<bool(const Case&)>& fails, double seconds);
Case shrunk(const Case& one, const Target& target, const std::string& check, double seconds);

}  // namespace headway::test::fuzz
