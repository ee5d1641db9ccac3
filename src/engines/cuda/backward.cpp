#include "engines/cuda/backward.h"

#include <algorithm>
#include <limits>

#include "core/text.h"
#include "engines/cuda/gradient_parts.h"
#include "engines/cuda/hopper_backward.h"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/short_gradient_kernels.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/short_backward.h"

namespace headway::cuda {

// Who finds delta, and how many launches the gradients take.
enum class BackwardKind : std::uint8_t {
  alone,    // one kernel, which finds delta itself
  hopper,   // several, with a delta of their own
  general,  // one for each gradient, after delta
};

// One kernel, or one for each gradient, as the host sees it.
struct BackwardKernel {
  const char* name;
  BackwardKind kind;
  std::size_t own_shared;  // bytes of shared memory that it declares itself, at most
  Refusal (*refusal)(const Problem& problem);
  Refusal (*call_refusal)(const BackwardProblem& problem);  // of what is only known of a call; null: it takes any
  bool (*has_both_in_one)(const Problem& problem, const Arguments& arguments);  // dk and dv; null: all three
  Launch (*launch)(const GradientArguments& arguments, DType dtype);            // of general kernels
  bool has_parts = false;                                                       // see gradient_parts.h
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
    {"short_gradient", BackwardKind::alone, 8192, short_backward_refusal, nullptr, nullptr, nullptr},
    {"hopper_backward", BackwardKind::hopper, 0, hopper_backward_refusal, hopper_gradient_refusal, nullptr, nullptr},
    {"mma_gradient", BackwardKind::general, 4096, tensor_core_refusal, nullptr, mma_has_both, mma_gradient_launch},
    {"hopper_split_gradient", BackwardKind::general, 3072, hopper_split_refusal, nullptr, always_has_both,
     hopper_split_gradient_launch, true},
    {"split_gradient", BackwardKind::general, 3072, split_refusal, nullptr, always_has_both, split_gradient_launch,
     true},
    {"simt_gradient", BackwardKind::general, 0, takes_all, nullptr, exact_has_both, simt_gradient_launch},
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

// Some kernels bring their own delta; gradients of bias and sinks need one all the same.
bool needs_delta(const BackwardProblem& problem, BackwardKind kind) {
  return kind == BackwardKind::general || problem.dbias || problem.dsinks;
}

int rows_a_tile(const Problem& problem, BackwardKind kind) {
  switch (kind) {
    case BackwardKind::alone: return short_gradient_rows_a_tile;
    case BackwardKind::hopper: return hopper_backward_rows_a_tile(problem);
    default: return delta_rows_a_tile;
  }
}

// Beside delta and what coarse rows need.
std::size_t own_bytes(const Problem& problem, BackwardKind kind) {
  switch (kind) {
    case BackwardKind::alone: return 0;
    case BackwardKind::hopper: return hopper_backward_bytes(problem);
    default: return row_bytes(problem, 1);
  }
}

// How many blocks share a tile of this gradient.
int parts_of(const BackwardKernel& kernel, const Problem& problem, GradientOf of) {
  if (!kernel.has_parts) {
    return 1;
  }
  GradientArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  arguments.of = of;
  return gradient_parts(problem, of, kernel.launch(arguments, problem.dtype()));
}

// The query's are added up before the others begin.
std::size_t part_bytes(const BackwardKernel& kernel, const Problem& problem) {
  const auto of = [&](GradientOf one) { return gradient_part_bytes(problem, one, parts_of(kernel, problem, one)); };
  return std::max(of(GradientOf::query), of(GradientOf::key_and_value));
}

std::size_t workspace_bytes(const BackwardProblem& problem, const BackwardKernel& kernel) {
  return lengths_bytes(problem) + (needs_delta(problem, kernel.kind) ? row_bytes(problem, 1) : 0) +
         own_bytes(problem, kernel.kind) + coarse_bytes(problem, rows_a_tile(problem, kernel.kind)) +
         part_bytes(kernel, problem);
}

class Backward {
 public:
  Backward(const BackwardProblem& problem, const BackwardChoice& choice)
      : problem_(problem),
        kernel_(*choice.kernel),
        stream_(static_cast<cudaStream_t>(problem.stream)),
        workspace_(workspace_bytes(problem, kernel_), problem.query.device().index, stream_, problem.operation),
        arguments_(arguments_of(problem)),
        grad_out_(rows_of(problem.grad_out)),
        lse_(row_values_of(problem.lse)) {
    place_lengths(problem, arguments_, workspace_, stream_);
    if (needs_delta(problem, kernel_.kind)) {
      delta_ = row_array(problem, workspace_.take(row_bytes(problem, 1)));
    }
    if (kernel_.kind == BackwardKind::general) {
      fine_lse_ = row_array(problem, workspace_.take(row_bytes(problem, 1)));
    }
    coarse_.all = extreme_scale(problem).has_value();
    coarse_.tile_rows = rows_a_tile(problem, kernel_.kind);
    coarse_.tiles = coarse_tiles(problem, coarse_.tile_rows);
    coarse_.statistics = row_array(problem, workspace_.take(row_bytes(problem, coarse_numbers)));
    coarse_.found = workspace_.take_as<int>(static_cast<std::size_t>(problem.batch * problem.heads * coarse_.tiles));
    parts_ = static_cast<std::byte*>(workspace_.take(part_bytes(kernel_, problem)));
  }

  void run() {
    if (needs_delta(problem_, kernel_.kind)) {
      deltas();
    }
    switch (kernel_.kind) {
      case BackwardKind::alone: short_gradients(); break;
      case BackwardKind::hopper: queue_hopper_backward(problem_, arguments_, coarse_, workspace_); break;
      case BackwardKind::general: general_gradients(); break;
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
    // The other kinds fill it themselves.
    arguments.coarse.found = kernel_.kind == BackwardKind::general ? coarse_.found : nullptr;
    arguments.coarse.all = coarse_.all;
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
    if (problem_.dv && of != GradientOf::query) {
      arguments.value_gradient = rows_of(*problem_.dv);
    }
    arguments.parts = parts_of(kernel_, problem_, of);
    if (arguments.parts == 1) {
      launch_one(arguments);
      return;
    }
    std::byte* memory = parts_;
    const GradientOf first = of == GradientOf::query ? of : GradientOf::key;
    const GradientPartsArguments all[] = {
        place_gradient_parts(problem_, first, arguments.parts, arguments.gradient, memory),
        place_gradient_parts(problem_, GradientOf::value, arguments.parts, arguments.value_gradient, memory)};
    arguments.gradient = all[0].parts, arguments.part_step = all[0].part_step;
    arguments.value_gradient = all[1].parts, arguments.value_part_step = all[1].part_step;
    launch_one(arguments);
    for (const GradientPartsArguments& one : all) {
      if (one.gradient.data != nullptr) {
        check(launch_gradient_parts(one, stream_), problem_.operation, "launching the sums of parts");
      }
    }
  }

  void launch_one(const GradientArguments& arguments) {
    const Launch launch = kernel_.launch(arguments, problem_.dtype());
    if (launch.tasks > 0) {
      allow_shared(launch.kernel, launch.shared_bytes, problem_.operation);
      check(launch_gradient(launch, arguments, stream_), problem_.operation, launch.name);
    }
  }

  void short_gradients() {
    const ShortGradientArguments arguments = all_gradients();
    const Launch launch = short_gradient_launch(arguments, problem_.dtype());
    allow_shared(launch.kernel, launch.shared_bytes, problem_.operation);
    check(launch_short_gradient(launch, arguments, stream_), problem_.operation, launch.name);
  }

  void coarse_gradients() {
    if (problem_.batch * problem_.kv_heads * problem_.query_len > 0) {
      CoarseGradientArguments arguments = all_gradients();
      if (problem_.softcap &&
          *problem_.softcap < arguments.softcap) {  // its slope is that of a cap below normal numbers
        arguments.softcap = std::max<double>(*problem_.softcap, std::numeric_limits<float>::denorm_min());
      }
      check(launch_coarse_gradients(arguments, problem_.dtype(), device_of(problem_).multiprocessors, stream_),
            problem_.operation, "launching the gradients of rows with large scores");
    }
  }

  // All inputs and all gradients of query, key and value that are asked for.
  CoarseGradientArguments all_gradients() const {
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
    return arguments;
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
  cudaStream_t stream_;
  Workspace workspace_;
  Arguments arguments_;
  Rows grad_out_, lse_, delta_;
  Rows fine_lse_;  // see DeltaArguments
  CoarseRows coarse_{};
  std::byte* parts_ = nullptr;  // of gradients
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

// What a kernel would launch, unless it does not fit.
std::optional<Launch> launch_of(const BackwardKernel& kernel, const Problem& problem, Refusal& reason) {
  if (kernel.kind == BackwardKind::hopper) {
    return hopper_backward_launch(problem);
  }
  if (kernel.kind == BackwardKind::general) {
    return general_launch(kernel, problem, reason);
  }
  ShortGradientArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  const Launch launch = short_gradient_launch(arguments, problem.dtype());
  reason = shared_refusal(launch, kernel.own_shared, device_of(problem));
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
      choice.launch = launch_of(kernel, problem, reason).value_or(Launch{});
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
  const BackwardKind kind = choice.kernel->kind;
  describe_launch(choice.launch, plan);
  const std::size_t bytes = lengths_bytes(problem) + (kind == BackwardKind::general ? row_bytes(problem, 1) : 0) +
                            own_bytes(problem, kind) + coarse_bytes(problem, rows_a_tile(problem, kind)) +
                            part_bytes(*choice.kernel, problem);
  if (choice.kernel->has_parts) {
    const int query = parts_of(*choice.kernel, problem, GradientOf::query);
    const int keys = parts_of(*choice.kernel, problem, GradientOf::key_and_value);
    if (query > 1 || keys > 1) {
      plan.kernel = text(plan.kernel, ", each tile of dq in ", query, " parts, of dk and dv in ", keys);
    }
  }
  if (kind == BackwardKind::hopper) {
    if (const std::int64_t parts = hopper_backward_parts(problem); parts > 1) {
      plan.kernel = text(plan.kernel, ", the queries of a kv head in ", parts, " parts");
    }
  }
  plan.scratch_bytes = static_cast<double>(bytes);
}

void backward(const BackwardProblem& problem, const BackwardChoice& planned) {
  // Gradients that the planned kernel cannot write to go to another one.
  const bool suits = planned.kernel->call_refusal == nullptr || !planned.kernel->call_refusal(problem);
  Backward(problem, suits ? planned : choose_backward(problem, &problem)).run();
}

}  // namespace headway::cuda
