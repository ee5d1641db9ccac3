#include "fuzz/runner.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <sstream>

#include "engines/cpu/arguments.h"
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
  static const std::vector<std::string> fields{"subject", "type",    "form", "sharing", "mask",
                                               "bias",    "stored",  "rope", "spans",   "causal",
                                               "valid",   "queries", "q",    "k",       "v"};
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
    kinds.emplace_back(plant.odd <= Odd::minus_inf ? "planted=not_finite" : "planted=odd_size");
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

// Instruction sets share the kernels of types for which they have nothing faster.
bool have_the_same_kernels(const Target& a, const Target& b, DType type) {
  static const std::vector<const cpu::Kernels*> available = cpu::available_kernels();
  const auto of = [](const Target& target) -> const cpu::Kernels* {
    for (const cpu::Kernels* kernels : available)
      if (target.isa == kernels->name) return kernels;
    return nullptr;
  };
  const cpu::Kernels *x = of(a), *y = of(b);
  if (a.engine != b.engine || x == nullptr || y == nullptr) return a.engine == b.engine && a.isa == b.isa;
  const auto n = static_cast<std::size_t>(cpu::storage_of(type));
  return x->forward[n].run == y->forward[n].run && x->decode[n].run == y->decode[n].run &&
         x->backward[n].gradients == y->backward[n].gradients && x->gemm[n].run == y->gemm[n].run;
}

// So many of the targets, no two with the same kernels. The reference is the definition in plain loops and slow: it
// gets an eighth of the cases, where there are others to draw.
std::vector<const Target*> drawn_targets(const Settings& settings, DType type, Random& random) {
  std::vector<const Target*> distinct;
  for (const Target& target : settings.targets)
    if (std::none_of(distinct.begin(), distinct.end(),
                     [&](const Target* other) { return have_the_same_kernels(*other, target, type); }))
      distinct.push_back(&target);
  std::shuffle(distinct.begin(), distinct.end(), random);
  const bool with_reference = random() % 8 == 0;
  std::stable_partition(distinct.begin(), distinct.end(),
                        [&](const Target* target) { return (target->engine == Engine::reference) == with_reference; });
  distinct.resize(std::min(distinct.size(), static_cast<std::size_t>(settings.targets_of_a_case)));
  return distinct;
}

// What a process of those that draw cases is at, for the process that follows it if it fails.
struct Slot {
  std::atomic<std::int64_t> next{0};  // the case it is at; the next one after a failure was noted
  std::atomic<std::int64_t> failed_case{0};
  std::atomic<std::int64_t> target{-1};  // of Settings::targets; -1 while the oracle computes
  SharedFailure failure;                 // of the process before this one
};

// One of the processes that draw cases: numbers worker, worker + jobs, ... A device does not survive a fork, so a
// finding ends the process, and the one that follows makes it smaller before it goes on.
class Worker {
 public:
  Worker(const Settings& settings, Clock::time_point begin, Counts& counts, Slot& slot)
      : settings_(settings), begin_(begin), counts_(counts), slot_(slot) {}

  // The exit code of the process.
  int run() {
    if (slot_.failure) {
      report(slot_.failed_case, slot_.target, slot_.failure.get());
      slot_.failure.clear();
    }
    for (; slot_.next < settings_.cases && !stopped(); slot_.next += settings_.jobs) {
      slot_.target = -1;
      Random random = stream(slot_.next);
      const Case drawn = draw(random);
      const Prepared prepared(drawn);
      if (!prepared.rejected.empty()) {
        ++counts_.rejected;
        continue;
      }
      for (const Target* target : drawn_targets(settings_, drawn.type, random))
        if (!passes(prepared, *target)) return 1;
      count_kinds(drawn, counts_);
      ++counts_.cases;
    }
    return 0;
  }

 private:
  bool stopped() const {
    return interrupted || seconds_since(begin_) > settings_.seconds || counts_.findings >= settings_.findings;
  }

  Random stream(std::int64_t number) const {
    return Random(settings_.seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(number));
  }

  bool passes(const Prepared& prepared, const Target& target) {
    slot_.target = &target - settings_.targets.data();
    const std::int64_t before = comparisons();
    const Verdict verdict = run_here(prepared, target);
    counts_.comparisons += comparisons() - before;
    counts_.refused += verdict.refused;
    if (verdict.failed) slot_.failure.set(verdict.failure);
    return !verdict.failed;
  }

  void report(std::int64_t number, std::int64_t target_number, const Failure& failure) {
    Random random = stream(number);
    const Case drawn = draw(random);
    if (target_number < 0) return print_finding(drawn, drawn, {Engine::reference, "oracle"}, failure);
    const Target& target = settings_.targets[static_cast<std::size_t>(target_number)];
    if (!counts_.first(failure.check + name(target))) return print_finding(drawn, drawn, target, failure);
    const Case smallest = shrunk(drawn, target, failure.check, settings_.shrink_seconds);
    const Verdict verdict = judge(Prepared(smallest), target);
    print_finding(smallest, drawn, target, verdict.failed ? verdict.failure : failure);
  }

  const Settings& settings_;
  Clock::time_point begin_;
  Counts& counts_;
  Slot& slot_;
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
  std::vector<std::unique_ptr<Shared<Slot>>> slots;
  std::map<pid_t, Slot*> workers;
  const auto start = [&](Slot& slot) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      const int code = Worker(settings, begin, *counts, slot).run();
      std::fflush(nullptr);
      _exit(code);
    }
    if (child > 0) workers[child] = &slot;
  };
  for (int number = 0; number < settings.jobs; ++number) {
    Shared<Slot>& slot = *slots.emplace_back(std::make_unique<Shared<Slot>>());
    slot->next = number;
    start(*slot);
  }
  while (!workers.empty()) {
    int status = 0;
    const auto ended = workers.find(waitpid(-1, &status, settings.progress ? WNOHANG : 0));
    if (ended != workers.end()) {
      Slot& slot = *ended->second;
      workers.erase(ended);
      if (const auto failure = failure_of_process(status)) {
        if (!slot.failure) slot.failure.set(*failure);
        slot.failed_case = slot.next.load();
        slot.next += settings.jobs;
        ++counts->findings;
        start(slot);
      }
    }
    if (settings.progress) {
      show_progress(*counts, seconds_since(begin));
      usleep(200000);
    }
  }
  if (settings.progress) std::printf("\r%60s\r", "");
  signal(SIGINT, before);
  return {counts->cases,    counts->rejected,     counts->refused,  counts->comparisons,
          counts->findings, seconds_since(begin), interrupted != 0, kinds_text(*counts)};
}

int replay(const Case& one, const Settings& settings) {
  int findings = 0;
  const Prepared prepared(one);
  if (!prepared.rejected.empty()) std::printf("nothing is promised of this case: %s\n", prepared.rejected.c_str());
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
