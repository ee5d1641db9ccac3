// headway_fuzz: draws hard cases until the time is up, or runs one case again.
#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "fuzz/runner.h"
#include "support/device_mirror.h"

namespace {

using namespace headway::test::fuzz;

constexpr const char* usage =
    R"(usage: headway_fuzz [--minutes N] [--cases N] [--seed S] [--engine reference|cpu|cuda] [--isa NAME]
                    [--targets N] [--batch-invariant] [--jobs N] [--findings N] [--shrink-seconds N]
                    [--replay LINE] [--shrink LINE]

Draws hard cases and compares engines and instruction sets with the float64 oracle, and bit for bit where the contract
promises that: each case on N of them (2) that are drawn too, and --replay on all of them. A finding is made smaller and
printed as a line for --replay. The exit code is 1 if there was one.
)";

struct Arguments {
  Settings settings;
  std::string replayed, shrunk;
};

Arguments parse(int argc, char** argv) {
  Arguments result;
  Settings& settings = result.settings;
  settings.seed = std::random_device{}();
  settings.jobs = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  settings.progress = isatty(STDOUT_FILENO) != 0;
  std::string engine, isa;
  bool batch_invariant = false;
  std::optional<double> shrink_seconds;
  for (int n = 1; n < argc; ++n) {
    const std::string option = argv[n];
    const auto value = [&]() -> std::string {
      if (n + 1 >= argc) throw std::invalid_argument(option + " takes a value");
      return argv[++n];
    };
    if (option == "--minutes")
      settings.seconds = 60 * std::stod(value());
    else if (option == "--cases")
      settings.cases = std::stoll(value()), settings.seconds = 1e9;
    else if (option == "--seed")
      settings.seed = std::stoull(value());
    else if (option == "--engine")
      engine = value();
    else if (option == "--isa")
      isa = value();
    else if (option == "--jobs")
      settings.jobs = std::stoi(value());
    else if (option == "--shrink-seconds")
      shrink_seconds = std::stod(value());
    else if (option == "--findings")
      settings.findings = std::stoi(value());
    else if (option == "--batch-invariant")
      batch_invariant = true;
    else if (option == "--targets")
      settings.targets_of_a_case = std::stoi(value());
    else if (option == "--replay")
      result.replayed = value();
    else if (option == "--shrink")
      result.shrunk = value();
    else
      throw std::invalid_argument("there is no option " + option);
  }
  settings.targets = targets(engine);
  if (!isa.empty()) std::erase_if(settings.targets, [&](const Target& target) { return target.isa != isa; });
  if (settings.targets.empty()) throw std::invalid_argument("there is no such engine or instruction set here");
  for (Target& target : settings.targets) target.batch_invariant = batch_invariant;
  if (engine == "cuda") settings.shrink_seconds = 300;  // a process needs a second or so to start there
  if (shrink_seconds) settings.shrink_seconds = *shrink_seconds;
  return result;
}

int shrink_line(const std::string& line, const Settings& settings) {
  const Case one = case_of(line);
  for (const Target& target : settings.targets) {
    const Verdict verdict = judge(Prepared(one), target);
    if (!verdict.failed) continue;
    const Case smallest = shrunk(one, target, verdict.failure.check, settings.shrink_seconds);
    return replay(smallest, settings) > 0;
  }
  return 0;
}

int run(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  const Settings& settings = arguments.settings;
  if (!arguments.replayed.empty()) return replay(case_of(arguments.replayed), settings) > 0;
  if (!arguments.shrunk.empty()) return shrink_line(arguments.shrunk, settings);
  headway::test::DeviceMirror::share_one_block(true);
  std::string list;
  for (const Target& target : settings.targets) list += (list.empty() ? "" : ", ") + name(target);
  std::cout << "seed " << settings.seed << " on " << list << std::endl;
  const Summary summary = fuzz(settings);
  std::cout << (summary.interrupted ? "interrupted: " : "") << summary.cases << " cases in "
            << static_cast<int>(summary.seconds) << " s, "
            << static_cast<double>(summary.cases) / std::max(summary.seconds, 1e-3) << " a second, each on "
            << std::min<std::size_t>(static_cast<std::size_t>(settings.targets_of_a_case), settings.targets.size())
            << " targets, " << summary.comparisons << " comparisons; " << summary.rejected
            << " drawn of which nothing is promised, " << summary.refused << " refused\n"
            << summary.kinds << '\n'
            << (summary.findings == 0 ? "no findings" : std::to_string(summary.findings) + " findings") << " (seed "
            << settings.seed << ")" << std::endl;
  return summary.findings > 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && (std::string(argv[1]) == "--help" || std::string(argv[1]) == "-h")) {
    std::cout << usage;
    return 0;
  }
  // Most of the time would go into pages that the system clears again and again.
  mallopt(M_MMAP_THRESHOLD, 1 << 28);
  mallopt(M_TRIM_THRESHOLD, 1 << 28);
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "headway_fuzz: " << error.what() << '\n' << usage;
    return 2;
  }
}
