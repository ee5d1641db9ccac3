#include "engines/cuda/scores.h"

#include "core/text.h"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/plan_text.h"
#include "engines/cuda/problem_arguments.h"

namespace headway::cuda {
namespace {

Launch choose_launch(const Problem& problem, const ScoresArguments& arguments) {
  return is_half_type(problem.dtype()) && problem.head_dim <= mma_widest
             ? mma_matrix_launch(arguments, problem.dtype())
             : simt_matrix_launch(arguments, problem.dtype());
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

void describe_scores(const Problem& problem, Plan& plan) {
  ScoresArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  describe_launch(choose_launch(problem, arguments), plan);
  plan.scratch_bytes = static_cast<double>(lengths_bytes(problem));
}

void queue_scores(const Problem& problem, const Arguments& arguments, const TensorView& matrix, headway::Stage stage) {
  ScoresArguments all{};
  static_cast<Arguments&>(all) = arguments;
  all.scores = matrix_of(matrix);
  all.stage = stage_of(stage);
  const Launch launch = choose_launch(problem, all);
  if (launch.tasks > 0 && problem.key_len > 0) {
    allow_shared(launch.kernel, launch.shared_bytes, problem.operation);
    check(launch_matrix(launch, all, static_cast<cudaStream_t>(problem.stream)), problem.operation,
          text("launching ", launch.name));
  }
}

void scores(const ScoresProblem& problem) {
  Arguments arguments = arguments_of(problem);
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  Workspace workspace(lengths_bytes(problem), problem.query.device().index, stream, problem.operation);
  place_lengths(problem, arguments, workspace, stream);
  queue_scores(problem, arguments, problem.scores, problem.stage);
}

}  // namespace headway::cuda
