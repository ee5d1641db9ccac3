// Plans: what every engine's plan holds, and the readable text.
#include "core/plan.h"

#include <array>
#include <cmath>
#include <iomanip>
#include <ostream>

#include "core/key_range.h"
#include "core/out_of_memory.h"
#include "core/text.h"

namespace headway {
namespace {

std::string side(const std::optional<std::int64_t>& width) { return width ? text(*width) : "unlimited"; }

std::string options_text(const Problem& problem) {
  std::string result;
  const auto add = [&](const auto&... parts) { result += text(result.empty() ? "" : ", ", parts...); };
  if (problem.causal != Causal::none) {
    add("causal ", problem.causal == Causal::top_left ? "top_left" : "bottom_right");
  }
  if (problem.window_left || problem.window_right) {
    add("window (", side(problem.window_left), ", ", side(problem.window_right), ")");
  }
  if (problem.packed()) {
    add(problem.batch, problem.pages ? " sequences of packed queries" : " packed sequences");
  }
  if (problem.pages) {
    add("pages of ", problem.pages->size);
  }
  if (problem.valid_lens) {
    add("valid_lens ", problem.valid_lens_per_batch ? "[B]" : "[B,Sq]");
  }
  if (problem.query_lens) {
    add("query_lens");
  }
  if (problem.spans) {
    add("spans (up to ", problem.spans->size(3), problem.span_rows == 1 ? " a row)" : " a block of ");
    result += problem.span_rows == 1 ? "" : text(problem.span_rows, " rows)");
  }
  add("scale ", problem.scale);
  if (problem.softcap) {
    add("softcap ", *problem.softcap);
  }
  if (problem.bias) {
    add("bias ", problem.bias->dtype());
  }
  if (problem.alibi_slopes) {
    add("alibi");
  }
  if (problem.mask) {
    add("mask");
  }
  if (problem.sinks) {
    add("sinks");
  }
  if (problem.dropout.active()) {
    add("dropout seed ", problem.dropout.seed);
  }
  if (problem.wants_lse) {
    add("lse");
  }
  if (problem.wants_weights) {
    add("weights");
  }
  return result;
}

// The bytes of all sequences' keys and values, with their scales; pages that sequences share count for each.
double paged_bytes(const Problem& problem) {
  const bool scaled = problem.pages->key_scales.has_value();
  const double row =
      static_cast<double>(problem.head_dim + problem.value_dim) * static_cast<double>(size_of(problem.key_dtype())) +
      (scaled ? 2.0 * sizeof(float) : 0.0);
  double keys = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    keys += static_cast<double>(sequence(problem, b).key_count);
  }
  return keys * static_cast<double>(problem.kv_heads) * row;
}

// The bytes of the inputs and outputs, each element once.
double bytes_moved(const Problem& problem) {
  const auto element = static_cast<double>(size_of(problem.dtype()));
  const auto count = [](const ConstTensorView& view) { return static_cast<double>(view.elements()); };
  const auto rows = static_cast<double>(problem.query_rows()) * static_cast<double>(problem.heads);
  // A packed view repeats its rows for each sequence.
  const double repeats = problem.packed() ? std::max<double>(1.0, static_cast<double>(problem.batch)) : 1.0;
  const double keys =
      problem.pages ? paged_bytes(problem) : (count(problem.key) + count(problem.value)) / repeats * element;
  const double inputs = count(problem.query) / repeats * element + keys;
  const double out = rows * static_cast<double>(problem.value_dim) * element;
  const double lse = rows * (problem.dtype() == DType::f64 ? 8.0 : 4.0);
  const double matrix = rows * static_cast<double>(problem.key_len) * element;
  switch (problem.pass) {
    case Pass::forward: return inputs + out + (problem.wants_lse ? lse : 0) + (problem.wants_weights ? matrix : 0);
    case Pass::backward: return 2 * inputs + 2 * out + lse;
    case Pass::scores: return inputs + matrix;
  }
  return 0;
}

// 1234567 with a unit: 1.23 M
std::string with_unit(double value, const char* unit) {
  static constexpr std::array<const char*, 7> prefixes = {"", "k", "M", "G", "T", "P", "E"};
  std::size_t prefix = 0;
  while (std::fabs(value) >= 999.5 && prefix + 1 < prefixes.size()) {
    value /= 1000;
    ++prefix;
  }
  return text(std::setprecision(3), value, " ", prefixes[prefix], unit);
}

}  // namespace

Plan common_plan(const Problem& problem) {
  Plan plan;
  plan.operation = problem.operation;
  plan.pairs = visited_pairs(problem);
  plan.flops = 2 * static_cast<double>(problem.head_dim + problem.value_dim) * plan.pairs *
               (problem.pass == Pass::backward ? 2.5 : 1.0);
  plan.bytes = bytes_moved(problem);
  plan.all_pairs = static_cast<double>(problem.batch) * static_cast<double>(problem.heads) *
                   static_cast<double>(problem.query_len) * static_cast<double>(problem.key_len);
  return plan;
}

void describe_problem(const Problem& problem, Plan& plan) {
  const Dims rows = {problem.batch, problem.heads, problem.query_len, problem.head_dim};
  if (problem.pages) {
    const auto pages = [](const ConstTensorView& view) { return view.transpose(1, 2).sizes(); };
    plan.shape = text("query ", rows, " ", problem.dtype(), ", key_pages ", pages(problem.key), ", value_pages ",
                      pages(problem.value), " ", problem.key_dtype(), ", up to ", problem.key_len, " keys");
  } else {
    const Dims keys = {problem.batch, problem.kv_heads, problem.key_len, problem.head_dim};
    const Dims values = {problem.batch, problem.kv_heads, problem.key_len, problem.value_dim};
    plan.shape = text("query ", rows, ", key ", keys, ", value ", values, ", ", problem.dtype());
  }
  plan.options = options_text(problem);
}

const char* name(Engine engine) {
  switch (engine) {
    case Engine::automatic: return "automatic";
    case Engine::reference: return "reference";
    case Engine::cpu: return "cpu";
    case Engine::cuda: return "cuda";
  }
  return "unknown";
}

std::ostream& operator<<(std::ostream& stream, Engine engine) { return stream << name(engine); }

std::ostream& operator<<(std::ostream& stream, const Plan& plan) {
  const double share = plan.all_pairs > 0 ? 100 * plan.pairs / plan.all_pairs : 0;
  stream << plan.operation << " on the " << name(plan.engine) << " engine\n"
         << "  shapes   " << plan.shape << '\n'
         << "  options  " << plan.options << '\n'
         << "  kernel   " << plan.kernel << ", " << plan.instruction_set << ", tiles of " << plan.query_block
         << " queries x " << plan.key_block << " keys\n"
         << "  work     " << with_unit(plan.pairs, "pairs") << text(std::setprecision(3), " (", share, " % of all), ")
         << with_unit(plan.flops, "FLOP") << ", " << with_unit(plan.bytes, "B") << " in and out\n"
         << "  runs as  " << plan.tasks << (plan.tasks == 1 ? " task on " : " tasks on ") << plan.threads
         << (plan.threads == 1 ? " thread, " : " threads, ") << with_unit(plan.scratch_bytes, "B") << " of scratch\n";
  if (plan.registers > 0) {
    stream << "  each     " << plan.registers << " registers a thread, "
           << with_unit(static_cast<double>(plan.shared_bytes), "B") << " of shared memory, " << plan.stages
           << (plan.stages == 1 ? " stage, " : " stages, ") << plan.splits
           << (plan.splits == 1 ? " split of the keys\n" : " splits of the keys\n");
  }
  for (const Plan::PassedKernel& passed : plan.passed_kernels) {
    stream << "  not      " << passed.kernel << ": " << passed.reason << '\n';
  }
  for (const Plan::PassedOver& passed : plan.passed_over) {
    stream << "  not on   " << name(passed.engine) << ": " << passed.reason << '\n';
  }
  return stream;
}

std::string to_string(const Plan& plan) try { return text(plan); } catch (...) {
  throw_own_error("to_string");
}

}  // namespace headway
