// The mean of the weights over the heads, queued on the call's stream.
#include "analysis/on_device.h"
#include "core/text.h"
#include "engines/cuda/kernels/mean_weights_kernels.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/scores.h"

namespace headway {

void mean_weights_on_device(const Problem& problem, const ConstTensorView& lse, const TensorView& mean) {
  using namespace cuda;
  const int device = problem.query.device().index;
  const DeviceScope scope(device, problem.operation);
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  MeanWeightsArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  Workspace workspace(lengths_bytes(problem), device, stream, problem.operation);
  place_lengths(problem, arguments, workspace, stream);
  arguments.lse = row_values_of(lse);
  arguments.mean = matrix_of(ConstTensorView(mean).unsqueeze(1));
  const Launch launch = choose_mean_weights(problem, arguments);
  if (launch.tasks > 0) {
    allow_shared(launch.kernel, launch.shared_bytes, problem.operation);
    check(launch_mean_weights(launch, arguments, stream), problem.operation, text("launching ", launch.name));
    check(launch_coarse_mean_weights(arguments, problem.dtype(), stream), problem.operation,
          "launching the weights of rows with large scores");
  }
}

}  // namespace headway
