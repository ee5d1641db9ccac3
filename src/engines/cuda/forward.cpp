#include "engines/cuda/forward.h"

#include "core/text.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/problem_arguments.h"

namespace headway::cuda {
namespace {

Launch choose_launch(const Problem& problem, const ForwardArguments& arguments) {
  return simt_forward_launch(arguments, problem.dtype());
}

}  // namespace

void describe_forward(const Problem& problem, Plan& plan) {
  ForwardArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  const Launch launch = choose_launch(problem, arguments);
  plan.kernel = launch.name;
  plan.query_block = launch.query_block;
  plan.key_block = launch.key_block;
  plan.tasks = launch.tasks;
  plan.threads = launch.threads;
  plan.scratch_bytes = static_cast<double>(lengths_bytes(problem));
}

void forward(const ForwardProblem& problem) {
  ForwardArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  arguments.out = rows_of(problem.out);
  if (problem.lse) {
    arguments.lse = row_values_of(*problem.lse);
  }
  const Launch launch = choose_launch(problem, arguments);
  if (launch.tasks == 0) {
    return;
  }
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  const int device = problem.query.device().index;
  Workspace workspace(lengths_bytes(problem), device, stream, problem.operation);
  place_lengths(problem, arguments, workspace, stream);
  allow_shared(launch.kernel, launch.shared_bytes, problem.operation);
  check(launch_simt_forward(launch, arguments, stream), problem.operation, text("launching ", launch.name));
}

}  // namespace headway::cuda
