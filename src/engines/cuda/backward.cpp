#include "engines/cuda/backward.h"

#include <algorithm>

#include "core/text.h"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/plan_text.h"
#include "engines/cuda/problem_arguments.h"

namespace headway::cuda {
namespace {

// Whether one kernel has the gradients of key and value.
bool has_both_in_one(const Problem& problem) {
  return fits_tensor_cores(problem) && std::max(problem.head_dim, problem.value_dim) <= mma_both_widest;
}

Launch choose_launch(const Problem& problem, const GradientArguments& arguments) {
  if (fits_tensor_cores(problem)) {
    return mma_gradient_launch(arguments, problem.dtype());
  }
  return simt_gradient_launch(arguments, problem.dtype());
}

// delta [B,H,Sq], packed [H,total]: one number for each row.
std::size_t delta_bytes(const Problem& problem) {
  const std::size_t number = problem.dtype() == DType::f64 ? 8 : 4;
  return Workspace::rounded(number * static_cast<std::size_t>(problem.query_rows() * problem.heads));
}

Rows delta_rows(const Problem& problem, void* data) {
  const std::int64_t rows = problem.query.size(2);
  return {data, problem.packed() ? 0 : problem.heads * rows, rows, 1, 0, false};
}

class Backward {
 public:
  Backward(const BackwardProblem& problem)
      : problem_(problem),
        stream_(static_cast<cudaStream_t>(problem.stream)),
        workspace_(lengths_bytes(problem) + delta_bytes(problem), problem.query.device().index, stream_,
                   problem.operation),
        arguments_(arguments_of(problem)),
        grad_out_(rows_of(problem.grad_out)),
        lse_(row_values_of(problem.lse)) {
    place_lengths(problem, arguments_, workspace_, stream_);
    delta_ = delta_rows(problem, workspace_.take(delta_bytes(problem)));
  }

  void run() {
    DeltaArguments deltas{};
    static_cast<Arguments&>(deltas) = arguments_;
    deltas.grad_out = grad_out_;
    deltas.out = rows_of(problem_.out);
    deltas.delta = delta_;
    if (problem_.batch * problem_.heads * problem_.query_len > 0) {
      check(launch_row_deltas(deltas, problem_.dtype(), stream_), problem_.operation, "launching delta");
    }
    if (problem_.dq) {
      gradient(GradientOf::query);
    }
    if (has_both_in_one(problem_) && (problem_.dk || problem_.dv)) {
      gradient(GradientOf::key_and_value);
    } else {
      if (problem_.dk) {
        gradient(GradientOf::key);
      }
      if (problem_.dv) {
        gradient(GradientOf::value);
      }
    }
    if (problem_.dbias) {
      bias_gradient(*problem_.dbias);
    }
    if (problem_.dsinks) {
      sink_gradient(*problem_.dsinks);
    }
  }

 private:
  template <class Some>
  void fill(Some& some) const {
    static_cast<Arguments&>(some) = arguments_;
    some.lse = lse_;
    some.delta = delta_;
  }

  void gradient(GradientOf of) {
    GradientArguments arguments{};
    fill(arguments);
    arguments.grad_out = grad_out_;
    arguments.of = of;
    const std::optional<TensorView>& target = of == GradientOf::query ? problem_.dq : problem_.dk;
    if (target) {
      arguments.gradient = rows_of(*target);
    }
    if (problem_.dv) {
      arguments.value_gradient = rows_of(*problem_.dv);
    }
    const Launch launch = choose_launch(problem_, arguments);
    if (launch.tasks > 0) {
      allow_shared(launch.kernel, launch.shared_bytes, problem_.operation);
      check(launch_gradient(launch, arguments, stream_), problem_.operation, text("launching ", launch.name));
    }
  }

  void bias_gradient(const TensorView& target) {
    BiasGradientArguments arguments{};
    fill(arguments);
    arguments.grad_out = grad_out_;
    arguments.gradient = matrix_of(target);
    const std::int64_t sizes[] = {problem_.batch, problem_.heads, problem_.query_len, problem_.key_len};
    for (int axis = 0; axis < 4; ++axis) {
      arguments.sums[axis] = target.size(axis) == 1 && sizes[axis] != 1;
    }
    const Launch launch = simt_bias_gradient_launch(arguments, problem_.dtype());
    allow_shared(launch.kernel, launch.shared_bytes, problem_.operation);
    check(launch_bias_gradient(launch, arguments, stream_), problem_.operation, "launching the bias gradient");
  }

  void sink_gradient(const TensorView& target) {
    SinkGradientArguments arguments{};
    fill(arguments);
    arguments.gradient = {target.data(), target.stride(0), target.dtype()};
    if (problem_.heads > 0) {
      check(launch_sink_gradients(arguments, problem_.dtype(), stream_), problem_.operation,
            "launching the sink gradient");
    }
  }

  const BackwardProblem& problem_;
  cudaStream_t stream_;
  Workspace workspace_;
  Arguments arguments_;
  Rows grad_out_, lse_, delta_;
};

}  // namespace

void describe_backward(const Problem& problem, Plan& plan) {
  GradientArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  arguments.of = GradientOf::key;
  describe_launch(choose_launch(problem, arguments), plan);
  plan.scratch_bytes = static_cast<double>(lengths_bytes(problem) + delta_bytes(problem));
}

void backward(const BackwardProblem& problem) { Backward(problem).run(); }

}  // namespace headway::cuda
