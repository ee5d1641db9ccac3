// The public calls: check, agree with the other ranks, schedule, run.
#include <cmath>
#include <cstring>

#include "core/elements.h"
#include "core/key_range.h"
#include "core/out_of_memory.h"
#include "core/validate.h"
#include "distributed/agreement.h"
#include "distributed/global_problem.h"
#include "distributed/run.h"

namespace headway::distributed {
namespace {

// What this rank brings, checked on its own: views as [B,H,n,D], packed with B = 1.
struct Local {
  Sizes sizes;  // lengths are this rank's
  ConstTensorView query, key, value;
};

// Options that do not depend on lengths; those that do are checked with the whole sequence's.
AttentionOptions without_lengths(const AttentionOptions& options) {
  AttentionOptions result;
  result.scale = options.scale;
  result.softcap = options.softcap;
  result.alibi_slopes = options.alibi_slopes;
  result.sinks = options.sinks;
  return result;
}

AttentionOptions without_matrices(AttentionOptions options) {
  options.mask.reset();
  options.bias.reset();
  return options;
}

void refuse_what_is_missing(const char* operation, const ConstTensorView& query, const AttentionOptions& options) {
  if (!(query.device() == Device{})) {
    throw Unsupported(text(operation, ": the tensors are on ", query.device(), ", and only host memory is read yet"));
  }
  if (options.dropout != 0) {
    throw Unsupported(
        text(operation, ": dropout is ", options.dropout, "; dropout over a split sequence is not there yet"));
  }
  if (options.engine == Engine::cuda) {
    throw Unsupported(text(operation, ": the cuda engine is not used over a split sequence yet"));
  }
}

// One packed "sequence" with all of this rank's rows, so that validation takes the packed layout.
class OwnBounds {
 public:
  OwnBounds(const ConstTensorView& query, const ConstTensorView& key)
      : queries_{0, query.rank() > 0 ? query.size(0) : 0}, keys_{0, key.rank() > 0 ? key.size(0) : 0} {}
  void add_to(Call& call) const {
    call.cu_seqlens_q = ConstTensorView(queries_, {2});
    call.cu_seqlens_k = ConstTensorView(keys_, {2});
  }

 private:
  std::array<std::int64_t, 2> queries_, keys_;
};

Local local_of(const Problem& problem) {
  return {{.batch = problem.query.size(0),
           .heads = problem.heads,
           .kv_heads = problem.kv_heads,
           .queries = problem.query.size(2),
           .keys = problem.key.size(2),
           .head_dim = problem.head_dim,
           .value_dim = problem.value_dim,
           .dtype = problem.dtype()},
          problem.query,
          problem.key,
          problem.value};
}

std::string text_of(const std::optional<Window>& window) {
  if (!window) {
    return "none";
  }
  const auto side = [](const std::optional<std::int64_t>& width) { return width ? text(*width) : "unlimited"; };
  return text("(", side(window->left), ", ", side(window->right), ")");
}

template <class Number>
std::string text_of(const std::optional<Number>& number) {
  return number ? text(*number) : "none";
}

const char* text_of(Causal causal) {
  constexpr const char* names[] = {"none", "square", "top_left", "bottom_right"};
  return names[static_cast<int>(causal)];
}

void add_shared(Agreement& agreement, const Sizes& sizes, const Options& options) {
  const AttentionOptions& of = options.attention;
  agreement.same("the type", sizes.dtype);
  agreement.same("batch", sizes.batch);
  agreement.same("the number of heads", sizes.heads);
  agreement.same("the number of kv heads", sizes.kv_heads);
  agreement.same("head_dim", sizes.head_dim);
  agreement.same("value_dim", sizes.value_dim);
  agreement.same("causal", text_of(of.causal));
  agreement.same("window", text_of(of.window));
  agreement.same("scale", text_of(of.scale));
  agreement.same("softcap", text_of(of.softcap));
  agreement.same("alibi_slopes", digest(of.alibi_slopes));
  agreement.same("sinks", digest(of.sinks));
  agreement.same("valid_lens", digest(of.valid_lens));
  agreement.same("query_lens", digest(of.query_lens));
  agreement.same("mask", of.mask ? "given" : "none");
  agreement.same("bias", of.bias ? "given" : "none");
  agreement.same("cu_seqlens_q", digest(options.packing ? std::optional(options.packing->cu_seqlens_q) : std::nullopt));
  agreement.same("cu_seqlens_k", digest(options.packing ? std::optional(options.packing->cu_seqlens_k) : std::nullopt));
  agreement.same("scheme", name(options.scheme));
  agreement.same("the sharding", digest(options.sharding));
  const Cluster& cluster = options.cluster;
  agreement.same("the cluster",
                 text(cluster.ranks_per_node, " ", cluster.flops, " ", cluster.bandwidth, " ", cluster.latency, " ",
                      cluster.node_bandwidth, " ", cluster.node_latency, " ", cluster.call));
}

// The shards, from what was asked for and what the ranks brought.
Sharding sharding_of(const char* operation, const Options& options,
                     const std::vector<std::vector<std::int64_t>>& lengths) {
  std::vector<std::int64_t> queries, keys;
  for (const auto& of_rank : lengths) {
    queries.push_back(of_rank.at(0));
    keys.push_back(of_rank.at(1));
  }
  if (!options.sharding) {
    return contiguous(queries, keys);
  }
  const Sharding& given = *options.sharding;
  if (given.queries.size() != lengths.size() || given.keys.size() != lengths.size()) {
    throw InvalidArgument(
        text(operation, ": the sharding is of ", given.queries.size(), " ranks, expected ", lengths.size()));
  }
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    const std::int64_t of_queries = count(given.queries[rank]), of_keys = count(given.keys[rank]);
    if (of_queries != queries[rank] || of_keys != keys[rank]) {
      throw InvalidArgument(text(operation, ": rank ", rank, " brings ", queries[rank], " queries and ", keys[rank],
                                 " keys, its shard has ", of_queries, " and ", of_keys));
    }
  }
  return given;
}

Scheme scheme_of(const char* operation, const Options& options, const Sizes& sizes, const Seen& seen,
                 const Sharding& sharding, bool backward) {
  constexpr Scheme all[] = {Scheme::all_gather, Scheme::ring, Scheme::heads, Scheme::pass_query};
  const bool has_matrix = options.attention.mask || options.attention.bias;
  const bool moves_queries = options.scheme == Scheme::heads || options.scheme == Scheme::pass_query;
  if (has_matrix && moves_queries) {
    throw Unsupported(text(operation, ": scheme ", name(options.scheme),
                           " moves queries away from their rows of the mask or bias; use ring or all_gather"));
  }
  if (options.scheme == Scheme::pass_query && backward) {
    return Scheme::ring;  // the gradients go the other way
  }
  if (options.scheme != Scheme::automatic) {
    return options.scheme;
  }
  return choose_among(std::span(all, has_matrix ? 2 : 4), sizes, seen, sharding, options.cluster, backward);
}

// Everything that is the same for all ranks, and this rank's place in it.
struct Agreed {
  Schedule schedule;
  Whole whole;
};

// Mask and bias: this rank's queries and all keys. Their shapes are this rank's own, so ranks agree once more.
void add_matrices(const char* operation, Transport& transport, const Options& options, const ConstTensorView& query,
                  Agreed& agreed) {
  const AttentionOptions& given = options.attention;
  if (!given.mask && !given.bias) {
    return;
  }
  Agreement agreement(operation, transport);
  agreement.attempt([&] {
    if (options.packing) {
      throw Unsupported(text(operation, ": a mask or bias over packed sequences is not there yet"));
    }
    AttentionOptions matrices;
    matrices.mask = given.mask;
    matrices.bias = given.bias;
    Dims sizes = query.sizes();
    sizes[sizes.size() - 2] = agreed.schedule.sizes.keys;
    if (sizes.size() == 4) {
      sizes[1] = agreed.schedule.sizes.kv_heads;
    }
    const ConstTensorView keys = shape_only(query.dtype(), sizes);
    const Problem placed = inputs_problem(
        {.operation = operation, .query = query, .key = keys, .value = keys, .options = matrices}, Pass::forward);
    agreed.whole.mask = placed.mask;
    agreed.whole.bias = placed.bias;
  });
  agreement.reach();
}

Agreed agree(const char* operation, Agreement& agreement, const Options& options, const Local& local,
             Transport& transport, bool backward) {
  add_shared(agreement, local.sizes, options);
  agreement.own(local.sizes.queries);
  agreement.own(local.sizes.keys);
  const auto lengths = agreement.reach();
  Agreed agreed;
  Sizes sizes = local.sizes;
  const Sharding sharding = sharding_of(operation, options, lengths);
  sizes.queries = sizes.keys = 0;
  for (const auto& of_rank : lengths) {
    sizes.queries += of_rank[0];
    sizes.keys += of_rank[1];
  }
  AttentionOptions attention = without_matrices(options.attention);
  attention.progress = [&transport, inner = options.attention.progress](double share) {
    transport.progress();
    return !inner || inner(share);
  };
  agreed.whole.problem =
      global_problem(operation, sizes, attention, options.packing, backward ? Pass::backward : Pass::forward);
  const Seen seen = seen_by(agreed.whole.problem);
  const Scheme scheme = scheme_of(operation, options, sizes, seen, sharding, backward);
  agreed.schedule = schedule(scheme, sizes, seen, sharding, backward);
  return agreed;
}

// - sum over rows of exp(sink - lse) <grad_out, out>: over this rank's rows, then over the ranks in their order.
void store_sink_gradient(const BackwardRun& run, const ConstTensorView& sinks, TensorView dsinks) {
  const std::int64_t heads = run.sizes().heads;
  std::vector<double> sums(static_cast<std::size_t>(heads));
  for (std::int64_t h = 0; h < heads; ++h) {
    const double sink = load_float(sinks, h * sinks.stride(0));
    for (std::int64_t b = 0; b < run.sizes().batch; ++b) {
      for (std::int64_t i = 0; i < run.query.size(2); ++i) {
        const double lse = load_float(run.lse, b * run.lse.stride(0) + h * run.lse.stride(1) + i * run.lse.stride(2));
        double delta = 0;
        for (std::int64_t c = 0; c < run.sizes().value_dim && !std::isinf(lse); ++c) {
          const double out = load_float(run.out, row_offset(run.out, b, h, i) + c * run.out.stride(3));
          // A row without keys has out 0, and what grad_out holds there does not count.
          delta += out == 0 && lse == sink
                       ? 0
                       : out * load_float(run.grad_out, row_offset(run.grad_out, b, h, i) + c * run.grad_out.stride(3));
        }
        sums[static_cast<std::size_t>(h)] -= delta == 0 ? 0 : std::exp(sink - lse) * delta;
      }
    }
  }
  const std::string mine(reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(double));
  std::vector<double> totals(sums.size());
  for (const std::string& text : run.transport.all_gather(mine)) {
    for (std::size_t h = 0; h < totals.size(); ++h) {
      double of_rank = 0;
      std::memcpy(&of_rank, text.data() + h * sizeof(double), sizeof(double));
      totals[h] += of_rank;
    }
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    store_float(dsinks, h * dsinks.stride(0), totals[static_cast<std::size_t>(h)]);
  }
}

}  // namespace

void attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out, Transport& transport,
               const Options& options, const AttentionOutputs& outputs) try {
  constexpr const char* operation = "distributed::attention";
  Agreement agreement(operation, transport);
  ForwardProblem problem;
  Local local;
  const OwnBounds bounds(query, key);
  const AttentionOptions checked = without_lengths(options.attention);
  agreement.attempt([&] {
    refuse_what_is_missing(operation, query, options.attention);
    if (outputs.weights) {
      throw Unsupported(text(operation, ": weights are not stored over a split sequence"));
    }
    Call call = {.operation = operation, .query = query, .key = key, .value = value, .options = checked};
    if (options.packing) {
      bounds.add_to(call);
    }
    problem = forward_problem(call, out, {.lse = outputs.lse});
    local = local_of(problem);
  });
  Agreed agreed = agree(operation, agreement, options, local, transport, false);
  add_matrices(operation, transport, options, query, agreed);
  std::optional<Tensor> own_lse;
  if (!problem.lse) {
    own_lse = Tensor::uninitialized({local.sizes.batch, local.sizes.heads, local.sizes.queries},
                                    local.sizes.dtype == DType::f64 ? DType::f64 : DType::f32);
    problem.lse = *own_lse;
  }
  const ForwardRun run{
      {transport, agreed.schedule, agreed.whole, local.query, local.key, local.value}, problem.out, *problem.lse};
  switch (agreed.schedule.scheme) {
    case Scheme::heads: forward_over_heads(run); break;
    case Scheme::pass_query: forward_over_queries(run); break;
    default: forward_over_keys(run);
  }
} catch (...) {
  throw_own_error("distributed::attention");
}

void attention_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                        ConstTensorView out, ConstTensorView lse, const AttentionGradients& gradients,
                        Transport& transport, const Options& options) try {
  constexpr const char* operation = "distributed::attention_backward";
  Agreement agreement(operation, transport);
  BackwardProblem problem;
  Local local;
  const OwnBounds bounds(query, key);
  const AttentionOptions checked = without_lengths(options.attention);
  agreement.attempt([&] {
    refuse_what_is_missing(operation, query, options.attention);
    if (gradients.dbias) {
      throw Unsupported(text(operation, ": the gradient of the bias over a split sequence is not there yet"));
    }
    Call call = {.operation = operation, .query = query, .key = key, .value = value, .options = checked};
    if (options.packing) {
      bounds.add_to(call);
    }
    problem = backward_problem(call, grad_out, out, lse, gradients);
    local = local_of(problem);
  });
  agreement.same("dsinks", gradients.dsinks ? "given" : "none");
  Agreed agreed = agree(operation, agreement, options, local, transport, true);
  add_matrices(operation, transport, options, query, agreed);
  const BackwardRun run{{transport, agreed.schedule, agreed.whole, local.query, local.key, local.value},
                        problem.grad_out,
                        problem.out,
                        problem.lse,
                        problem.dq,
                        problem.dk,
                        problem.dv};
  agreed.schedule.scheme == Scheme::heads ? backward_over_heads(run) : backward_over_keys(run);
  if (problem.dsinks) {
    store_sink_gradient(run, *problem.sinks, *problem.dsinks);
  }
} catch (...) {
  throw_own_error("distributed::attention_backward");
}

}  // namespace headway::distributed
