#include "engines/cuda/backward.h"

#include <algorithm>

#include "core/text.h"
#include "engines/cuda/hopper_backward.h"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/problem_arguments.h"

namespace headway::cuda {

// One kernel, or one for each gradient, as the host sees it.
struct BackwardKernel {
  const char* name;
  std::size_t own_shared;  // bytes of shared memory that it declares itself, at most
  Refusal (*refusal)(const Problem& problem);
  Refusal (*call_refusal)(const BackwardProblem& problem);  // of what is only known of a call; null: it takes any
  bool (*has_both_in_one)(const Problem& problem, const Arguments& arguments);  // dk and dv; null: all three
  Launch (*launch)(const GradientArguments& arguments, DType dtype);

  bool hopper() const { return launch == nullptr; }
};

namespace {

bool mma_has_both(const Problem& problem, const Arguments&) {
  return std::max(problem.head_dim, problem.value_dim) <= mma_both_widest;
}

bool always_has_both(const Problem&, const Arguments&) { return true; }

bool exact_has_both(const Problem& problem, const Arguments& arguments) {
  return simt_has_both(arguments, problem.dtype());
}

Refusal takes_all(const Problem&) { return std::nullopt; }

// The fastest that could take a call first. The last one takes everything.
constexpr BackwardKernel kernels[] = {
    {"hopper_backward", 0, hopper_backward_refusal, hopper_gradient_refusal, nullptr, nullptr},
    {"mma_gradient", 4096, tensor_core_refusal, nullptr, mma_has_both, mma_gradient_launch},
    {"split_gradient", 2560, split_refusal, nullptr, always_has_both, split_gradient_launch},
    {"simt_gradient", 0, takes_all, nullptr, exact_has_both, simt_gradient_launch},
};

// Arrays [B,H,Sq], packed [H,total], of so many numbers for each row.
std::size_t row_bytes(const Problem& problem, std::size_t numbers) {
  const std::size_t number = problem.dtype() == DType::f64 ? 8 : 4;
  return Workspace::rounded(numbers * number * static_cast<std::size_t>(problem.query_rows() * problem.heads));
}
constexpr std::size_t coarse_numbers = sizeof(CoarseRow<float>) / sizeof(float);

Rows row_array(const Problem& problem, void* data) {
  const std::int64_t rows = problem.query.size(2);
  return {data, problem.packed() ? 0 : problem.heads * rows, rows, 1, 0, false};
}

std::int64_t coarse_tiles(const Problem& problem, int tile_rows) {
  return (problem.query_len + tile_rows - 1) / tile_rows;
}

std::size_t coarse_bytes(const Problem& problem, int tile_rows) {
  const auto tiles = static_cast<std::size_t>(problem.batch * problem.heads * coarse_tiles(problem, tile_rows));
  return row_bytes(problem, coarse_numbers) + Workspace::rounded(tiles * sizeof(int));
}

// The Hopper kernel brings its own delta; gradients of bias and sinks need one all the same.
bool needs_delta(const BackwardProblem& problem, bool hopper) { return !hopper || problem.dbias || problem.dsinks; }

int rows_a_tile(const Problem& problem, bool hopper) {
  return hopper ? hopper_backward_rows_a_tile(problem) : delta_rows_a_tile;
}

std::size_t workspace_bytes(const BackwardProblem& problem, bool hopper) {
  return lengths_bytes(problem) + (needs_delta(problem, hopper) ? row_bytes(problem, 1) : 0) +
         (hopper ? hopper_backward_bytes(problem) : row_bytes(problem, 1)) +
         coarse_bytes(problem, rows_a_tile(problem, hopper));
}

class Backward {
 public:
  Backward(const BackwardProblem& problem, const BackwardChoice& choice)
      : problem_(problem),
        kernel_(*choice.kernel),
        hopper_(kernel_.hopper()),
        stream_(static_cast<cudaStream_t>(problem.stream)),
        workspace_(workspace_bytes(problem, hopper_), problem.query.device().index, stream_, problem.operation),
        arguments_(arguments_of(problem)),
        grad_out_(rows_of(problem.grad_out)),
        lse_(row_values_of(problem.lse)) {
    place_lengths(problem, arguments_, workspace_, stream_);
    if (needs_delta(problem, hopper_)) {
      delta_ = row_array(problem, workspace_.take(row_bytes(problem, 1)));
    }
    if (!hopper_) {
      fine_lse_ = row_array(problem, workspace_.take(row_bytes(problem, 1)));
    }
    coarse_.tile_rows = rows_a_tile(problem, hopper_);
    coarse_.tiles = coarse_tiles(problem, coarse_.tile_rows);
    coarse_.statistics = row_array(problem, workspace_.take(row_bytes(problem, coarse_numbers)));
    coarse_.found = workspace_.take_as<int>(static_cast<std::size_t>(problem.batch * problem.heads * coarse_.tiles));
  }

  void run() {
    if (needs_delta(problem_, hopper_)) {
      deltas();
    }
    if (hopper_) {
      queue_hopper_backward(problem_, arguments_, coarse_, workspace_);
    } else {
      general_gradients();
    }
    coarse_gradients();
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
    some.coarse = coarse_;
  }

  void deltas() {
    DeltaArguments arguments{};
    static_cast<Arguments&>(arguments) = arguments_;
    arguments.grad_out = grad_out_;
    arguments.out = rows_of(problem_.out);
    arguments.lse = lse_;
    arguments.delta = delta_;
    arguments.fine_lse = fine_lse_;
    arguments.coarse.found = hopper_ ? nullptr : coarse_.found;  // else the Hopper backward fills it
    if (problem_.batch * problem_.heads * problem_.query_len > 0) {
      check(launch_row_deltas(arguments, problem_.dtype(), stream_), problem_.operation, "launching delta");
    }
  }

  void general_gradients() {
    if (problem_.dq) {
      gradient(GradientOf::query);
    }
    if ((problem_.dk || problem_.dv) && kernel_.has_both_in_one(problem_, arguments_)) {
      gradient(GradientOf::key_and_value);
      return;
    }
    if (problem_.dk) {
      gradient(GradientOf::key);
    }
    if (problem_.dv) {
      gradient(GradientOf::value);
    }
  }

  void gradient(GradientOf of) {
    GradientArguments arguments{};
    static_cast<Arguments&>(arguments) = arguments_;
    arguments.lse = fine_lse_;
    arguments.delta = delta_;
    arguments.grad_out = grad_out_;
    arguments.of = of;
    const std::optional<TensorView>& target = of == GradientOf::query ? problem_.dq : problem_.dk;
    if (target) {
      arguments.gradient = rows_of(*target);
    }
    if (problem_.dv) {
      arguments.value_gradient = rows_of(*problem_.dv);
    }
    const Launch launch = kernel_.launch(arguments, problem_.dtype());
    if (launch.tasks > 0) {
      allow_shared(launch.kernel, launch.shared_bytes, problem_.operation);
      check(launch_gradient(launch, arguments, stream_), problem_.operation, launch.name);
    }
  }

  void coarse_gradients() {
    CoarseGradientArguments arguments{};
    static_cast<Arguments&>(arguments) = arguments_;
    arguments.grad_out = grad_out_;
    arguments.out = rows_of(problem_.out);
    arguments.lse = lse_;
    arguments.coarse = coarse_;
    arguments.of_bias = problem_.dbias.has_value();
    const auto place = [](const std::optional<TensorView>& view, Rows& rows) {
      if (view) {
        rows = rows_of(*view);
      }
    };
    place(problem_.dq, arguments.query_gradient);
    place(problem_.dk, arguments.key_gradient);
    place(problem_.dv, arguments.value_gradient);
    if (problem_.batch * problem_.kv_heads * problem_.query_len > 0) {
      check(launch_coarse_gradients(arguments, problem_.dtype(), device_of(problem_).multiprocessors, stream_),
            problem_.operation, "launching the gradients of rows with large scores");
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
  const BackwardKernel& kernel_;
  const bool hopper_;
  cudaStream_t stream_;
  Workspace workspace_;
  Arguments arguments_;
  Rows grad_out_, lse_, delta_;
  Rows fine_lse_;  // see DeltaArguments
  CoarseRows coarse_{};
};

// Of the keys' gradients, or of those of keys and values in one; nothing where the query's does not fit.
std::optional<Launch> general_launch(const BackwardKernel& kernel, const Problem& problem, Refusal& reason) {
  GradientArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  const GradientOf of_keys = kernel.has_both_in_one(problem, arguments) ? GradientOf::key_and_value : GradientOf::key;
  Launch launch;
  for (const GradientOf of : {GradientOf::query, of_keys}) {
    arguments.of = of;
    launch = kernel.launch(arguments, problem.dtype());
    if ((reason = shared_refusal(launch, kernel.own_shared, device_of(problem)))) {
      return std::nullopt;
    }
  }
  return launch;
}

}  // namespace

BackwardChoice choose_backward(const Problem& problem, const BackwardProblem* call, PassedKernels* passed) {
  BackwardChoice choice;
  for (const BackwardKernel& kernel : kernels) {
    Refusal reason = kernel.refusal(problem);
    if (!reason && call != nullptr && kernel.call_refusal != nullptr) {
      reason = kernel.call_refusal(*call);
    }
    if (!reason) {
      choice.kernel = &kernel;
      choice.launch = kernel.hopper() ? hopper_backward_launch(problem)
                                      : general_launch(kernel, problem, reason).value_or(Launch{});
    }
    if (!reason) {
      break;
    }
    if (passed != nullptr) {
      passed->push_back({kernel.name, std::move(*reason)});
    }
  }
  return choice;
}

void describe_backward(const Problem& problem, const BackwardChoice& choice, Plan& plan) {
  const bool hopper = choice.kernel->hopper();
  describe_launch(choice.launch, plan);
  std::size_t bytes = lengths_bytes(problem) + coarse_bytes(problem, rows_a_tile(problem, hopper));
  if (hopper) {
    bytes += hopper_backward_bytes(problem);
    if (const std::int64_t parts = hopper_backward_parts(problem); parts > 1) {
      plan.kernel = text(plan.kernel, ", the query heads of a kv head in ", parts, " parts");
    }
  } else {
    bytes += 2 * row_bytes(problem, 1);
  }
  plan.scratch_bytes = static_cast<double>(bytes);
}

void backward(const BackwardProblem& problem, const BackwardChoice& planned) {
  // Gradients that the planned kernel cannot write to go to another one.
  const bool suits = planned.kernel->call_refusal == nullptr || !planned.kernel->call_refusal(problem);
  Backward(problem, suits ? planned : choose_backward(problem, &problem)).run();
}

}  // namespace headway::cuda
