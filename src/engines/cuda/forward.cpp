#include "engines/cuda/forward.h"

#include <algorithm>

#include "core/text.h"
#include "engines/cuda/decode.h"
#include "engines/cuda/direct.h"
#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/kernels/forward_kernels.h"
#include "engines/cuda/kernels/paged_kernels.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/scores.h"

namespace headway::cuda {

// One forward kernel as the host sees it.
struct ForwardKernel {
  const char* name;
  std::size_t own_shared;  // bytes of shared memory that it declares itself, at most
  Refusal (*refusal)(const Problem& problem);
  Refusal (*out_refusal)(const TensorView& out);  // null: it writes to any output
  Launch (*launch)(const Problem& problem, const ForwardArguments& arguments);
  std::size_t (*workspace)(const Problem& problem, const Launch& launch);
  cudaError_t (*queue)(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                       Workspace& workspace);
};

namespace {

// Whether a running sum over the keys or features could drift, or avoiding it costs nothing. An invariant call has one
// kernel for all lengths: those of a pack depend on the others. (f64 has short chains of features always.)
bool needs_compensation(const Problem& problem) {
  constexpr std::int64_t few_queries = 64, many_features = 256;
  const bool wide = problem.dtype() == DType::f64;
  const std::int64_t many_keys = wide ? 1024 : 16384;
  return problem.key_len > many_keys || problem.query_len <= few_queries || problem.batch_invariant ||
         (!wide && problem.head_dim > many_features);
}

Refusal plain_refusal(const Problem& problem) {
  return extreme_scale(problem) ? Refusal() : "neither its scale nor its softcap is extreme";
}

Refusal mma_refusal(const Problem& problem) { return problem.pages ? "keys in pages" : tensor_core_refusal(problem); }

// Of the kernels for pages, in their order: each takes what the ones before it leave.
Refusal paged_refusal(const Problem& problem) { return problem.pages ? Refusal() : "keys are not in pages"; }

Refusal paged_bytes_refusal(const Problem& problem) {
  return problem.key_dtype() != problem.dtype() ? Refusal() : "keys are not 8-bit";
}

Refusal paged_mma_refusal(const Problem& problem) {
  return problem.pages ? tensor_core_refusal(problem) : "keys are not in pages";
}

// Few queries do not fill its tiles. An invariant call has one kernel for all lengths.
template <Refusal (*refusal)(const Problem&)>
Refusal unless_few_queries(const Problem& problem) {
  constexpr std::int64_t few_queries = 64;
  if (problem.batch_invariant || problem.query_len <= few_queries) {
    return "few queries, or a batch-invariant call";
  }
  return refusal(problem);
}

template <Launch (*launch)(const ForwardArguments&)>
Launch of_f32(const Problem&, const ForwardArguments& arguments) {
  return launch(arguments);
}

Refusal compensated_refusal(const Problem& problem) {
  if (is_half_type(problem.dtype())) {
    return "halves have no sums that could drift further than they are rounded";
  }
  return needs_compensation(problem) ? Refusal() : "sums over so few keys and features do not drift";
}

Launch compensated_launch(const Problem& problem, const ForwardArguments& arguments) {
  return problem.dtype() == DType::f64 ? simt_compensated_f64_launch(arguments) : simt_compensated_launch(arguments);
}

template <Launch (*launch)(const ForwardArguments&, DType)>
Launch of_type(const Problem& problem, const ForwardArguments& arguments) {
  return launch(arguments, problem.dtype());
}

Launch choose_plain(const Problem& problem, const ForwardArguments& arguments) {
  return plain_forward_launch(arguments, problem.dtype(), problem.key_dtype());
}

Launch choose_paged_bytes(const Problem& problem, const ForwardArguments& arguments) {
  return paged_bytes_launch(arguments, problem.dtype(), problem.key_dtype());
}

Refusal takes_all(const Problem&) { return std::nullopt; }

// One tile of each, masked: several blocks of mma_forward on a multiprocessor, whose masks are bits, are done sooner
// than Hopper's one (on an H200, 64 x 64 of 1760 heads under a padding mask 41 us and 68, 49 x 49 of 252 heads with a
// bias 14 and 21). A pack's sequences and an invariant batch have one kernel for all lengths.
Refusal one_tile_refusal(const Problem& problem) {
  constexpr std::int64_t most = 64, widest_head = 128;
  const bool halves = !problem.bias || is_half_type(problem.bias->dtype());
  const bool other = problem.softcap || problem.alibi_slopes || problem.dropout.active() || problem.spans ||
                     problem.pages || problem.packed() || problem.batch_invariant;
  if (!(problem.mask || problem.bias) || !halves || other || problem.query_len > most || problem.key_len > most ||
      std::max(problem.head_dim, problem.value_dim) > widest_head) {
    return std::nullopt;
  }
  return text("mma_forward is faster with a mask or bias for at most ", most, " queries and keys");
}

Refusal hopper_forward_refusal(const Problem& problem) {
  if (Refusal reason = hopper_refusal(problem)) {
    return reason;
  }
  return one_tile_refusal(problem);
}

Launch choose_hopper(const Problem& problem, const ForwardArguments&) { return hopper_launch(problem); }

std::size_t no_workspace(const Problem&, const Launch&) { return 0; }

cudaError_t queue_plain(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                        Workspace&) {
  return launch_plain_forward(launch, arguments, problem.dtype(), static_cast<cudaStream_t>(problem.stream));
}

cudaError_t queue_tiles(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                        Workspace&) {
  return launch_forward(launch, arguments, static_cast<cudaStream_t>(problem.stream));
}

// The fastest that could take a call first. The last one takes everything.
constexpr ForwardKernel kernels[] = {
    {"plain_forward", 0, plain_refusal, nullptr, choose_plain, no_workspace, queue_plain},
    {"byte_decode", 1024, byte_decode_refusal, nullptr, choose_byte_decode, decode_bytes, queue_decode},
    {"hopper_decode (pages)", 1024, hopper_paged_decode_refusal, nullptr, choose_hopper_paged_decode, decode_bytes,
     queue_decode},
    {"decode (pages)", 1024, paged_decode_refusal, nullptr, choose_paged_decode, decode_bytes, queue_decode},
    {"exact_decode", 64, exact_decode_refusal, nullptr, choose_exact_decode, no_workspace, queue_exact_decode},
    {"direct_forward", 0, direct_forward_refusal, nullptr, choose_direct_forward, no_workspace, queue_direct_forward},
    {"hopper_decode", 1024, hopper_decode_refusal, nullptr, choose_hopper_decode, decode_bytes, queue_decode},
    {"decode", 1024, decode_refusal, nullptr, choose_decode, decode_bytes, queue_decode},
    {"hopper_forward", 0, hopper_forward_refusal, hopper_refusal, choose_hopper, hopper_bytes, queue_hopper},
    {"simt_forward (8-bit pages)", 4096, paged_bytes_refusal, nullptr, choose_paged_bytes, no_workspace, queue_tiles},
    {"mma_forward (pages)", 2048, paged_mma_refusal, nullptr, of_type<paged_mma_launch>, no_workspace, queue_tiles},
    {"simt_forward (pages)", 4096, paged_refusal, nullptr, of_type<paged_exact_launch>, no_workspace, queue_tiles},
    {"mma_forward", 2048, mma_refusal, nullptr, of_type<mma_forward_launch>, no_workspace, queue_tiles},
    {"hopper_split_forward", 4096, unless_few_queries<hopper_split_refusal>, nullptr,
     of_f32<hopper_split_forward_launch>, no_workspace, queue_tiles},
    {"split_forward", 4096, unless_few_queries<split_refusal>, nullptr, of_f32<split_forward_launch>, no_workspace,
     queue_tiles},
    {"simt_forward (compensated)", 4096, compensated_refusal, nullptr, compensated_launch, no_workspace, queue_tiles},
    {"simt_forward", 4096, takes_all, nullptr, of_type<simt_forward_launch>, no_workspace, queue_tiles},
};

}  // namespace

ForwardChoice choose_forward(const Problem& problem, const TensorView* out, PassedKernels* passed) {
  ForwardArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  ForwardChoice choice;
  for (const ForwardKernel& kernel : kernels) {
    Refusal reason = kernel.refusal(problem);
    if (!reason && out != nullptr && kernel.out_refusal != nullptr) {
      reason = kernel.out_refusal(*out);
    }
    if (!reason) {
      choice.kernel = &kernel;
      choice.launch = kernel.launch(problem, arguments);
      reason = shared_refusal(choice.launch, kernel.own_shared, device_of(problem));
    }
    if (!reason) {
      break;
    }
    if (passed != nullptr) {
      passed->push_back({kernel.name, std::move(*reason)});
    }
  }
  choice.workspace_bytes = lengths_bytes(problem) + choice.kernel->workspace(problem, choice.launch);
  return choice;
}

void describe_forward(const Problem&, const ForwardChoice& choice, Plan& plan) {
  describe_launch(choice.launch, plan);
  plan.scratch_bytes = static_cast<double>(choice.workspace_bytes);
}

void forward(const ForwardProblem& problem, const ForwardChoice& planned) {
  // An output that the planned kernel cannot write to goes to another one.
  const bool suits = planned.kernel->out_refusal == nullptr || !planned.kernel->out_refusal(problem.out);
  const ForwardChoice choice = suits ? planned : choose_forward(problem, &problem.out);
  const Launch& launch = choice.launch;
  if (launch.tasks == 0) {
    return;
  }
  ForwardArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  arguments.out = rows_of(problem.out);
  if (problem.lse) {
    arguments.lse = row_values_of(*problem.lse);
  }
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  Workspace workspace(choice.workspace_bytes, problem.query.device().index, stream, problem.operation);
  place_lengths(problem, arguments, workspace, stream);
  allow_shared(launch.kernel, launch.shared_bytes, problem.operation);
  check(choice.kernel->queue(problem, launch, arguments, workspace), problem.operation, launch.name);
  if (problem.weights) {
    queue_scores(problem, arguments, *problem.weights, headway::Stage::weights);
  }
}

}  // namespace headway::cuda
