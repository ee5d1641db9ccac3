#include "engines/cuda/scores.h"

#include "engines/cuda/kernels/analysis_pieces.h"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/problem_arguments.h"

namespace headway::cuda {
namespace {

Refusal mma_refusal(const Problem& problem) {
  if (!is_half_type(problem.dtype())) {
    return "neither bf16 nor f16";
  }
  return problem.head_dim > mma_widest ? Refusal("head_dim is over 256") : Refusal();
}

Stage stage_of(headway::Stage stage) {
  switch (stage) {
    case headway::Stage::scaled: return Stage::scaled;
    case headway::Stage::capped: return Stage::capped;
    case headway::Stage::biased: return Stage::biased;
    default: return Stage::weights;
  }
}

}  // namespace

namespace {

constexpr std::size_t own_shared = 6144;  // of a kernel that walks, besides what its launch asks for

// A walk on tensor cores where they take the problem and a block has room for it, else the exact one.
template <class SomeArguments>
Launch choose_walk(const Problem& problem, SomeArguments& arguments, Launch (*mma)(SomeArguments&, DType),
                   Launch (*simt)(SomeArguments&, DType), Refusal& reason) {
  reason = mma_refusal(problem);
  if (!reason) {
    const Launch launch = mma(arguments, problem.dtype());
    reason = shared_refusal(launch, own_shared, device_of(problem));
    if (!reason) {
      return launch;
    }
  }
  return simt(arguments, problem.dtype());
}

}  // namespace

Launch choose_scores(const Problem& problem, PassedKernels* passed) {
  ScoresArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  Refusal reason;
  const Launch launch =
      choose_walk<const ScoresArguments>(problem, arguments, mma_matrix_launch, simt_matrix_launch, reason);
  if (reason && passed != nullptr) {
    passed->push_back({"mma_matrix", std::move(*reason)});
  }
  return launch;
}

Launch choose_analysis(const Problem& problem, const AnalysisArguments& arguments) {
  Refusal reason;
  return choose_walk<const AnalysisArguments>(problem, arguments, mma_analysis_launch, simt_analysis_launch, reason);
}

std::optional<Launch> choose_simple_analysis(const Problem& problem, const AnalysisArguments& arguments) {
  constexpr std::int64_t fewest_keys = 256;
  const bool only_scale = problem.scale > 1e-20 && problem.scale < 1e3 && !problem.softcap && !problem.bias &&
                          !problem.mask && !problem.alibi_slopes && !problem.spans;
  const bool whole_call = arguments.entropy != nullptr && arguments.weights == nullptr &&
                          arguments.given_lse.data == nullptr && arguments.key_begin == 0 &&
                          arguments.key_end == problem.key_len && problem.key_len >= fewest_keys &&
                          arguments.row_end - arguments.row_begin >= analysis_rows;
  const bool large_cells =
      arguments.cell_sums == nullptr || (arguments.row_cell >= analysis_rows && arguments.key_cell >= analysis_rows);
  if (mma_refusal(problem) || !only_scale || !whole_call || !large_cells || !arguments.key.chunks) {
    return std::nullopt;
  }
  const auto launch = device_of(problem).major == 9 ? hopper_simple_analysis_launch : mma_simple_analysis_launch;
  const Launch simple = launch(arguments, problem.dtype());
  const bool fits = !shared_refusal(simple, own_shared, device_of(problem)) &&
                    !shared_refusal(mma_analysis_launch(arguments, problem.dtype()), own_shared, device_of(problem));
  return fits ? std::optional(simple) : std::nullopt;
}

Launch choose_mean_weights(const Problem& problem, MeanWeightsArguments& arguments) {
  Refusal reason;
  return choose_walk(problem, arguments, mma_mean_weights_launch, simt_mean_weights_launch, reason);
}

void describe_scores(const Problem& problem, const Launch& launch, Plan& plan) {
  describe_launch(launch, plan);
  plan.scratch_bytes = static_cast<double>(lengths_bytes(problem));
}

namespace {

void queue_launch(const Launch& launch, const Problem& problem, const Arguments& arguments, const TensorView& matrix,
                  headway::Stage stage) {
  ScoresArguments all{};
  static_cast<Arguments&>(all) = arguments;
  all.scores = matrix_of(matrix);
  all.stage = stage_of(stage);
  if (launch.tasks > 0 && problem.key_len > 0) {
    allow_shared(launch.kernel, launch.shared_bytes, problem.operation);
    check(launch_matrix(launch, all, static_cast<cudaStream_t>(problem.stream)), problem.operation, launch.name);
  }
}

}  // namespace

void queue_scores(const Problem& problem, const Arguments& arguments, const TensorView& matrix, headway::Stage stage) {
  queue_launch(choose_scores(problem), problem, arguments, matrix, stage);
}

void scores(const ScoresProblem& problem, const Launch& launch) {
  Arguments arguments = arguments_of(problem);
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  Workspace workspace(lengths_bytes(problem), problem.query.device().index, stream, problem.operation);
  place_lengths(problem, arguments, workspace, stream);
  queue_launch(launch, problem, arguments, problem.scores, problem.stage);
}

}  // namespace headway::cuda
