// The CPU engine's forward pass. A unit is one block of query rows of one head; a task is some consecutive units,
// enough to pay off. No row's bits depend on how rows are grouped, so the grouping may depend on the thread count.
#include "engines/cpu/forward.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"
#include "engines/cpu/arguments.h"
#include "engines/cpu/decode.h"
#include "engines/cpu/kernels.h"
#include "engines/cpu/scratch.h"
#include "engines/cpu/tasks.h"
#include "headway/threads.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t panel_bytes_limit = std::int64_t{1}
                                           << 19;  // Q and O panels of a task in half a megabyte of cache

const ForwardKernel& forward_kernel_for(const Problem& problem) {
  const auto storage = static_cast<int>(storage_of(problem.dtype()));
  return is_8bit(problem.key_dtype()) ? chosen_kernels().scaled_forward[storage] : chosen_kernels().forward[storage];
}

// Whether a panel's scores are kept until all its keys are done.
bool keeps_matrix(const Problem& problem) { return problem.wants_weights || problem.pass == Pass::scores; }

// The panels of a unit: as many as profit from sharing a key block, but few enough that there are units for all
// threads.
std::int64_t panels_of_unit(const Problem& problem, const ForwardKernel& kernel, int threads) {
  if (keeps_matrix(problem)) {
    return 1;
  }
  const std::int64_t scalar = problem.dtype() == DType::f64 ? 8 : 4;
  const std::int64_t bytes =
      std::max<std::int64_t>(1, kernel.panel_rows * (problem.head_dim + problem.value_dim) * scalar);
  std::int64_t panels = std::clamp<std::int64_t>(panel_bytes_limit / bytes, 1, kernel.most_panels);
  const auto units = [&](std::int64_t count) {
    const std::int64_t rows = count * kernel.panel_rows;
    return problem.batch * problem.heads * ceil_div(problem.query_len, rows);
  };
  while (panels > 1 && units(panels) < 4 * threads) {
    panels /= 2;
  }
  return panels;
}

// Units in a fixed numbering, without decoded sequences: head by head, and inside a head the last rows first, which see
// the most keys when causal.
class Units {
 public:
  Units(const ForwardProblem& problem, std::int64_t rows) : problem_(problem), rows_(rows) {
    if (!problem.lengths_vary()) {
      per_head_ = blocks(problem.query_len);
      count_ = problem.batch * problem.heads * per_head_;
      return;
    }
    begins_.reserve(static_cast<std::size_t>(problem.batch) + 1);
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      begins_.push_back(count_);
      const Sequence current = sequence(problem, b);
      const bool elsewhere = is_decoded(problem, current.query_count, current.key_count);
      count_ += elsewhere ? 0 : problem.heads * blocks(current.query_count);
    }
    begins_.push_back(count_);
  }

  std::int64_t count() const { return count_; }

  struct Unit {
    std::int64_t b, h, row_begin, row_end;
  };
  Unit unit(std::int64_t index) const {
    std::int64_t b = 0;
    std::int64_t per_head = per_head_;
    std::int64_t inside = index;
    std::int64_t rows = problem_.query_len;
    if (problem_.lengths_vary()) {
      b = std::upper_bound(begins_.begin(), begins_.end(), index) - begins_.begin() - 1;
      rows = sequence(problem_, b).query_count;
      per_head = blocks(rows);
      inside = index - begins_[static_cast<std::size_t>(b)];
    } else {
      b = index / (problem_.heads * per_head);
      inside = index % (problem_.heads * per_head);
    }
    const std::int64_t block = per_head - 1 - inside % per_head;
    return {b, inside / per_head, block * rows_, std::min((block + 1) * rows_, rows)};
  }

 private:
  std::int64_t blocks(std::int64_t rows) const { return ceil_div(rows, rows_); }

  const ForwardProblem& problem_;
  std::int64_t rows_;
  std::int64_t per_head_ = 0;
  std::int64_t count_ = 0;
  std::vector<std::int64_t> begins_;  // where lengths vary: the first unit of each sequence
};

ForwardArgs scratch_args(const Problem& problem) {
  ForwardArgs args;
  args.key = source_layout(problem, problem.key);
  args.value = source_layout(problem, problem.value);
  args.head_dim = problem.head_dim;
  args.value_dim = problem.value_dim;
  args.ranges.keys = problem.key_len;
  args.ranges.spans = problem.heads > 0 && problem.batch > 0 ? span_lists(problem, {}, 0, 0) : SpanLists{};
  args.dropout.active = problem.dropout.active();
  args.weights.data = keeps_matrix(problem) ? &args : nullptr;  // only asked whether it is there
  return args;
}

}  // namespace

void describe_forward(const Problem& problem, Plan& plan) {
  const Decoded decoded = decoded_sequences(problem);
  if (decoded.some) {
    describe_decode(problem, plan);
  }
  if (decoded.all) {
    return;
  }
  const ForwardKernel& kernel = forward_kernel_for(problem);
  const int threads = plan.flops < task_flops ? 1 : get_threads();
  const std::int64_t panels = panels_of_unit(problem, kernel, threads);
  plan.query_block = panels * kernel.panel_rows;
  plan.key_block = kernel.key_block;
  const std::int64_t tasks = problem.batch * problem.heads * ceil_div(problem.query_len, plan.query_block);
  plan.threads = std::max(plan.threads, static_cast<int>(std::clamp<std::int64_t>(tasks, 1, threads)));
  const double scratch = static_cast<double>(kernel.scratch_bytes(scratch_args(problem), panels)) * plan.threads;
  const char* name = problem.key_len <= kernel.short_keys ? "panels of queries in lanes, all keys at once"
                                                          : "panels of queries in lanes, online softmax";
  plan.tasks += tasks;
  plan.scratch_bytes = std::max(plan.scratch_bytes, scratch);
  plan.kernel = decoded.some ? text(plan.kernel, "; other sequences: ", name) : name;
}

namespace {

// The arguments of one unit after another.
class UnitArgs {
 public:
  UnitArgs(const ForwardProblem& problem, const Units& units)
      : problem_(problem), units_(units), bytes_(static_cast<std::int64_t>(size_of(problem.dtype()))) {}

  // Those of unit `index`; `next` is the thread's next unit, or -1.
  const ForwardArgs& at(std::int64_t index, std::int64_t next) {
    const Units::Unit unit = units_.unit(index);
    if (unit.b != b_) {
      b_ = unit.b;
      sequence_ = sequence(problem_, b_);
      args_ = forward_args(problem_, sequence_, b_);
    }
    set_head(problem_, sequence_, b_, unit.h, args_);
    args_.row_begin = unit.row_begin;
    args_.row_end = unit.row_end;
    announce(next);
    return args_;
  }

 private:
  // Where the next unit reads.
  void announce(std::int64_t next) {
    args_.next_query = args_.next_key = args_.next_value = nullptr;
    if (next < 0) {
      return;
    }
    const Units::Unit unit = units_.unit(next);
    const std::int64_t g = problem_.kv_head(unit.h);
    const Sequence after = unit.b == b_ ? sequence_ : sequence(problem_, unit.b);
    args_.next_query = row_address(problem_.query, bytes_, unit.b, unit.h, after.query_begin + unit.row_begin);
    if (problem_.pages) {
      return;  // its rows lie in many places
    }
    if (const void* key = row_address(problem_.key, bytes_, unit.b, g, after.key_begin); key != args_.key.rows.data) {
      args_.next_key = key;
      args_.next_value = row_address(problem_.value, bytes_, unit.b, g, after.key_begin);
    }
  }

  const ForwardProblem& problem_;
  const Units& units_;
  std::int64_t bytes_;  // of an element
  std::int64_t b_ = -1;
  Sequence sequence_;
  ForwardArgs args_;
};

void run_units(const ForwardProblem& problem, const Plan& plan, const ForwardKernel& kernel,
               void (*run)(const ForwardArgs&, void*)) {
  const Units units(problem, plan.query_block);
  if (units.count() == 0) {
    return;
  }
  const std::int64_t group =
      units_in_task(units.count(), plan.flops / static_cast<double>(units.count()), plan.threads);
  const std::int64_t tasks = ceil_div(units.count(), group);
  const std::int64_t scratch = kernel.scratch_bytes(scratch_args(problem), plan.query_block / kernel.panel_rows);
  SharedProgress progress(problem.operation, problem.progress, tasks);
  parallel_for(tasks, plan.threads, [&](std::int64_t task, int worker) {
    TaskScratch task_scratch;
    void* memory = task_scratch.at_least(scratch);
    const std::int64_t end = std::min((task + 1) * group, units.count());
    const std::int64_t foreseen = plan.threads == 1 ? units.count() : end;
    UnitArgs args(problem, units);
    for (std::int64_t index = task * group; index < end; ++index) {
      run(args.at(index, index + 1 < foreseen ? index + 1 : -1), memory);
    }
    progress.task_done(worker);
  });
  progress.finish();
}

}  // namespace

void forward(const ForwardProblem& problem, const Plan& plan) {
  const Decoded decoded = decoded_sequences(problem);
  if (decoded.some) {
    decode(problem);
  }
  if (!decoded.all) {
    const ForwardKernel& kernel = forward_kernel_for(problem);
    run_units(problem, plan, kernel, kernel.run);
  }
}

void scores(const ScoresProblem& problem, const Plan& plan) {
  ForwardProblem matrix;
  static_cast<Problem&>(matrix) = problem;
  matrix.out = TensorView(nullptr, problem.dtype(), {problem.batch, problem.heads, problem.query_len, 0});
  matrix.weights = problem.scores;
  matrix.wants_weights = true;
  if (problem.stage == Stage::weights) {
    matrix.pass = Pass::forward;  // the same way, and so the same bits, as weights beside an output
    forward(matrix, plan);
    return;
  }
  const ForwardKernel& kernel = forward_kernel_for(problem);
  if (problem.stage != Stage::biased) {  // no mask, range or bias yet
    matrix.causal = Causal::none;
    matrix.window_left = matrix.window_right = std::nullopt;
    matrix.valid_lens = matrix.query_lens = matrix.spans = std::nullopt;
    matrix.bias = matrix.mask = matrix.alibi_slopes = std::nullopt;
  }
  if (problem.stage == Stage::scaled) {
    matrix.softcap = std::nullopt;
  }
  run_units(matrix, plan, kernel, kernel.run_scores);
}

}  // namespace headway::cpu
