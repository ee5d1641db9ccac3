#include "fuzz/runner.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <sstream>

#include "engines/cpu/kernels.h"
#include "fuzz/child.h"

namespace headway::test::fuzz {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

volatile sig_atomic_t interrupted = 0;
void interrupt(int) { interrupted = 1; }

// Kinds of cases that are counted: every level of these fields.
const std::vector<std::string>& counted_fields() {
  static const std::vector<std::string> fields{"subject", "type",  "form",    "sharing", "mask", "bias",
                                               "causal",  "valid", "queries", "q",       "k",    "v"};
  return fields;
}

// What the processes count together.
struct Counts {
  std::atomic<std::int64_t> cases{0}, rejected{0}, refused{0}, comparisons{0}, findings{0};
  static constexpr std::size_t kinds = 256;
  std::atomic<std::int64_t> of_kind[kinds] = {};
  std::atomic<bool> found[kinds] = {};  // by a hash of the check and the target

  // Whether this is the first finding of the check on the target: only that one is made smaller.
  bool first(const std::string& check_and_target) {
    return !found[std::hash<std::string>{}(check_and_target) % kinds].exchange(true);
  }
};

// "field=level" of a case, with the default level where the line does not name one; every kind has one number in every
// process, since all of them draw the list in the same order.
std::vector<std::string> kinds_of(const Case& one) {
  std::map<std::string, std::string> levels{{"subject", "attention"}, {"type", "f32"}, {"form", "bhsd"},
                                            {"q", "normal"},          {"k", "normal"}, {"v", "normal"}};
  std::istringstream words(line_of(one));
  for (std::string word; words >> word;) levels[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  std::vector<std::string> kinds;
  for (const std::string& field : counted_fields())
    if (levels.count(field)) kinds.push_back(field + "=" + levels[field]);
  for (const Plant& plant : one.plants)
    kinds.push_back(plant.odd <= Odd::minus_inf ? "planted=not_finite" : "planted=odd_size");
  return kinds;
}

const std::vector<std::string>& kind_list() {
  static const std::vector<std::string> list = [] {
    std::vector<std::string> kinds;
    Random random(1);
    for (int n = 0; n < 5000; ++n)
      for (const std::string& kind : kinds_of(draw(random)))
        if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
    std::sort(kinds.begin(), kinds.end());
    return kinds;
  }();
  return list;
}

void count_kinds(const Case& one, Counts& counts) {
  for (const std::string& kind : kinds_of(one)) {
    const auto found = std::lower_bound(kind_list().begin(), kind_list().end(), kind);
    const auto number = static_cast<std::size_t>(found - kind_list().begin());
    if (found != kind_list().end() && *found == kind && number < Counts::kinds) ++counts.of_kind[number];
  }
}

std::string kinds_text(const Counts& counts) {
  std::ostringstream text;
  std::string field;
  for (std::size_t n = 0; n < kind_list().size() && n < Counts::kinds; ++n) {
    const std::string& kind = kind_list()[n];
    const std::size_t equals = kind.find('=');
    if (kind.substr(0, equals) != field) {
      field = kind.substr(0, equals);
      text << (n == 0 ? "  " : "\n  ") << field << ':';
    }
    text << ' ' << kind.substr(equals + 1) << ' ' << counts.of_kind[n];
  }
  return text.str();
}

void print_finding(const Case& smallest, const Case& drawn, const Target& target, const Failure& failure) {
  std::ostringstream text;
  text << "finding on " << name(target) << ": " << failure.check << "\n  " << failure.text
       << "\n  replay: " << line_of(smallest) << "\n  drawn:  " << line_of(drawn) << "\n";
  const std::string whole = text.str();
  std::fwrite(whole.data(), 1, whole.size(), stdout);
  std::fflush(stdout);
}

// One of the processes that draw cases: numbers worker, worker + jobs, ...
class Worker {
 public:
  Worker(const Settings& settings, int number, Clock::time_point begin, Counts& counts)
      : settings_(settings), number_(number), begin_(begin), counts_(counts) {}

  void run() {
    for (std::int64_t next = number_; next < settings_.cases && !stopped();) {
      Batch batch;
      const auto batch_begin = Clock::now();
      for (; next < settings_.cases && !stopped() && std::ssize(batch) < settings_.batch &&
             seconds_since(batch_begin) < 0.02 * static_cast<double>(settings_.batch);
           next += settings_.jobs)
        prepare(next, batch);
      for (const Target& target : settings_.targets) run_on(target, batch);
      if (!stopped()) counts_.cases += std::ssize(batch);
    }
  }

 private:
  bool stopped() const {
    return interrupted || seconds_since(begin_) > settings_.seconds || counts_.findings >= settings_.findings;
  }

  void prepare(std::int64_t number, Batch& batch) {
    Random random(settings_.seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(number));
    const Case drawn = draw(random);
    auto prepared = std::make_unique<Prepared>(drawn);
    if (!prepared->rejected.empty()) {
      ++counts_.rejected;
      return;
    }
    count_kinds(drawn, counts_);
    batch.push_back(std::move(prepared));
  }

  void run_on(const Target& target, const Batch& batch) {
    for (std::size_t begin = 0; begin < batch.size() && !stopped();) {
      const BatchResult result =
          run_batch(batch, begin, target, settings_.batch_invariant, [this] { return stopped(); });
      counts_.refused += result.refused;
      counts_.comparisons += result.comparisons;
      if (result.verdict.failed) {
        ++counts_.findings;
        report(batch[result.end]->materials.what, target, result.verdict.failure);
      }
      begin = result.end + 1;
    }
  }

  void report(const Case& drawn, const Target& target, const Failure& failure) {
    if (!counts_.first(failure.check + name(target))) return print_finding(drawn, drawn, target, failure);
    const Case smallest = shrunk(drawn, target, failure.check, settings_.shrink_seconds);
    const Verdict verdict = judge(Prepared(smallest), target);
    print_finding(smallest, drawn, target, verdict.failed ? verdict.failure : failure);
  }

  const Settings& settings_;
  int number_;
  Clock::time_point begin_;
  Counts& counts_;
};

void show_progress(const Counts& counts, double seconds) {
  std::printf("\r%lld cases, %.0f a second, %lld findings ", static_cast<long long>(counts.cases),
              static_cast<double>(counts.cases) / std::max(seconds, 1e-3), static_cast<long long>(counts.findings));
  std::fflush(stdout);
}

}  // namespace

std::string name(const Target& target) {
  std::string text = headway::name(target.engine);
  if (!target.isa.empty()) text.append("/").append(target.isa);
  return text;
}

std::vector<Target> targets(const std::string& engine) {
  if (engine == "cuda") return {{Engine::cuda, ""}};
  std::vector<Target> result;
  if (engine.empty() || engine == "reference") result.push_back({Engine::reference, ""});
  if (engine.empty() || engine == "cpu")
    for (const cpu::Kernels* kernels : cpu::available_kernels()) result.push_back({Engine::cpu, kernels->name});
  return result;
}

Verdict judge(const Prepared& prepared, const Target& target) {
  if (!prepared.rejected.empty()) return {};
  Batch batch;
  batch.push_back(std::make_unique<Prepared>(prepared.materials.what));
  const BatchResult result =
      run_batch(batch, 0, target, prepared.materials.call.options.batch_invariant, [] { return false; });
  Verdict verdict = result.verdict;
  verdict.refused = result.refused > 0;
  return verdict;
}

Case shrunk(const Case& one, const std::function<bool(const Case&)>& fails, double seconds) {
  const auto begin = Clock::now();
  Case smallest = one;
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (const Case& candidate : simpler(smallest)) {
      if (seconds_since(begin) > seconds || interrupted) return smallest;
      if (!fails(candidate)) continue;
      smallest = candidate;
      smaller = true;
      break;
    }
  }
  return smallest;
}

Case shrunk(const Case& one, const Target& target, const std::string& check, double seconds) {
  return shrunk(
      one,
      [&](const Case& candidate) {
        const Verdict verdict = judge(Prepared(candidate), target);
        return verdict.failed && verdict.failure.check == check;
      },
      seconds);
}

Summary fuzz(const Settings& settings) {
  const auto begin = Clock::now();
  Shared<Counts> counts;
  kind_list();
  interrupted = 0;
  const auto before = signal(SIGINT, interrupt);
  std::fflush(nullptr);
  std::vector<pid_t> workers;
  for (int number = 0; number < settings.jobs; ++number) {
    const pid_t child = fork();
    if (child == 0) {
      Worker(settings, number, begin, *counts).run();
      std::fflush(nullptr);
      _exit(0);
    }
    if (child > 0) workers.push_back(child);
  }
  std::int64_t broken = 0;
  while (!workers.empty()) {
    int status = 0;
    const pid_t done = waitpid(-1, &status, settings.progress ? WNOHANG : 0);
    if (done > 0 && std::erase(workers, done) > 0) broken += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    if (settings.progress) {
      show_progress(*counts, seconds_since(begin));
      usleep(200000);
    }
  }
  if (settings.progress) std::printf("\r%60s\r", "");
  signal(SIGINT, before);
  return {counts->cases,        counts->rejected, counts->refused,    counts->comparisons, counts->findings + broken,
          seconds_since(begin), interrupted != 0, kinds_text(*counts)};
}

int replay(const Case& one, const Settings& settings) {
  int findings = 0;
  Prepared prepared(one);
  if (!prepared.rejected.empty()) std::printf("nothing is promised of this case: %s\n", prepared.rejected.c_str());
  prepared.materials.call.options.batch_invariant = settings.batch_invariant;
  for (const Target& target : settings.targets) {
    const Verdict verdict = judge(prepared, target);
    findings += verdict.failed;
    if (verdict.failed)
      print_finding(one, one, target, verdict.failure);
    else
      std::printf("%s: %s\n", name(target).c_str(), verdict.refused ? "refused" : "as the contract says");
  }
  return findings;
}

}  // namespace headway::test::fuzz
