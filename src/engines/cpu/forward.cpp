// The CPU engine's forward pass. A unit is one block of query rows of one head; a task is some consecutive units,
// enough to be worth handing out. No row's bits depend on how rows are grouped, so the grouping may follow the thread
// count.
#include "engines/cpu/forward.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "core/progress.h"
#include "engines/cpu/arguments.h"
#include "engines/cpu/kernels.h"
#include "engines/cpu/scratch.h"
#include "headway/threads.h"

namespace headway::cpu {
namespace {

constexpr double task_flops = 2e6;  // about 20 microseconds of one core
constexpr std::int64_t panel_bytes_limit = std::int64_t{1}
                                           << 19;  // Q and O panels of a task in half a megabyte of cache

const ForwardKernel& kernel_for(const Problem& problem) {
  return chosen_kernels().forward[static_cast<int>(storage_of(problem.dtype()))];
}

// Whether a panel's scores are kept until all its keys are done.
bool keeps_matrix(const Problem& problem) { return problem.wants_weights || problem.pass == Pass::scores; }

// How many panels a unit has: as many as share a key block with profit, but enough units for the threads.
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
    return problem.batch * problem.heads * ((problem.query_len + rows - 1) / rows);
  };
  while (panels > 1 && units(panels) < 4 * threads) {
    panels /= 2;
  }
  return panels;
}

// Units in a fixed numbering: head by head, and inside a head the last rows first, which reach the most keys when
// causal.
class Units {
 public:
  Units(const ForwardProblem& problem, std::int64_t rows) : problem_(problem), rows_(rows) {
    if (!problem.packed()) {
      per_head_ = blocks(problem.query_len);
      count_ = problem.batch * problem.heads * per_head_;
      return;
    }
    begins_.reserve(static_cast<std::size_t>(problem.batch) + 1);
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      begins_.push_back(count_);
      count_ += problem.heads * blocks(sequence(problem, b).query_count);
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
    if (problem_.packed()) {
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
  std::int64_t blocks(std::int64_t rows) const { return (rows + rows_ - 1) / rows_; }

  const ForwardProblem& problem_;
  std::int64_t rows_;
  std::int64_t per_head_ = 0;
  std::int64_t count_ = 0;
  std::vector<std::int64_t> begins_;  // packed: the first unit of each sequence
};

ForwardArgs scratch_args(const Problem& problem) {
  ForwardArgs args;
  args.key.row_stride = problem.key.stride(2);
  args.key.column_stride = problem.key.stride(3);
  args.value.column_stride = problem.value.stride(3);
  args.head_dim = problem.head_dim;
  args.value_dim = problem.value_dim;
  args.ranges.keys = problem.key_len;
  args.dropout.active = problem.dropout.active();
  args.weights.data = keeps_matrix(problem) ? &args : nullptr;  // only asked whether it is there
  return args;
}

}  // namespace

void describe_forward(const Problem& problem, Plan& plan) {
  const ForwardKernel& kernel = kernel_for(problem);
  const int threads = plan.flops < task_flops ? 1 : get_threads();
  const std::int64_t panels = panels_of_unit(problem, kernel, threads);
  plan.query_block = panels * kernel.panel_rows;
  plan.key_block = kernel.key_block;
  const std::int64_t blocks = (problem.query_len + plan.query_block - 1) / plan.query_block;
  plan.tasks = problem.batch * problem.heads * blocks;
  plan.threads = static_cast<int>(std::clamp<std::int64_t>(plan.tasks, 1, threads));
  plan.scratch_bytes = static_cast<double>(kernel.scratch_bytes(scratch_args(problem), panels)) * plan.threads;
  plan.kernel = "panels of queries in lanes, online softmax";
}

namespace {

void run_units(const ForwardProblem& problem, const Plan& plan, const ForwardKernel& kernel,
               void (*run)(const ForwardArgs&, void*)) {
  const Units units(problem, plan.query_block);
  if (units.count() == 0) {
    return;
  }
  const double unit_flops = std::max(1.0, plan.flops / static_cast<double>(units.count()));
  const std::int64_t group = std::clamp<std::int64_t>(static_cast<std::int64_t>(task_flops / unit_flops), 1,
                                                      (units.count() + plan.threads - 1) / plan.threads);
  const std::int64_t tasks = (units.count() + group - 1) / group;
  const std::int64_t scratch = kernel.scratch_bytes(scratch_args(problem), plan.query_block / kernel.panel_rows);
  SharedProgress progress(problem.operation, problem.progress, tasks);
  parallel_for(tasks, plan.threads, [&](std::int64_t task, int worker) {
    void* memory = thread_scratch(scratch);
    for (std::int64_t index = task * group; index < std::min((task + 1) * group, units.count()); ++index) {
      const Units::Unit unit = units.unit(index);
      ForwardArgs args = forward_args(problem, unit.b, unit.h);
      args.row_begin = unit.row_begin;
      args.row_end = unit.row_end;
      run(args, memory);
    }
    trim_thread_scratch();
    progress.task_done(worker);
  });
  progress.finish();
}

}  // namespace

void forward(const ForwardProblem& problem, const Plan& plan) {
  const ForwardKernel& kernel = kernel_for(problem);
  run_units(problem, plan, kernel, kernel.run);
}

void scores(const ScoresProblem& problem, const Plan& plan) {
  ForwardProblem matrix;
  static_cast<Problem&>(matrix) = problem;
  matrix.out = TensorView(nullptr, problem.dtype(), {problem.batch, problem.heads, problem.query_len, 0});
  matrix.weights = problem.scores;
  matrix.wants_weights = true;
  const ForwardKernel& kernel = kernel_for(problem);
  if (problem.stage == Stage::weights) {
    run_units(matrix, plan, kernel, kernel.run);
    return;
  }
  if (problem.stage != Stage::biased) {  // no mask, range or bias yet
    matrix.causal = Causal::none;
    matrix.window_left = matrix.window_right = std::nullopt;
    matrix.valid_lens = matrix.query_lens = matrix.bias = matrix.mask = matrix.alibi_slopes = std::nullopt;
  }
  if (problem.stage == Stage::scaled) {
    matrix.softcap = std::nullopt;
  }
  run_units(matrix, plan, kernel, kernel.run_scores);
}

}  // namespace headway::cpu
