#include "distributed/agreed_call.h"

#include <array>

#include "distributed/agreement.h"
#include "distributed/global_problem.h"

namespace headway::distributed {
namespace {

// ---- This rank's arguments ----

void refuse_what_is_missing(const CallRequest& request) {
  if (!(request.query.device() == Device{})) {
    throw Unsupported(
        text(request.operation, ": the tensors are on ", request.query.device(), ", and only host memory is read yet"));
  }
  if (request.options.attention.engine == Engine::cuda) {
    throw Unsupported(text(request.operation, ": the cuda engine is not used over a split sequence yet"));
  }
}

// Options that do not depend on lengths; the others are checked with the lengths of the whole sequence.
AttentionOptions without_lengths(const AttentionOptions& options) {
  AttentionOptions result;
  result.scale = options.scale;
  result.softcap = options.softcap;
  result.alibi_slopes = options.alibi_slopes;
  result.sinks = options.sinks;
  result.dropout = options.dropout;
  result.seed = options.seed;
  return result;
}

Sizes sizes_of(const Problem& problem) {
  return {.batch = problem.query.size(0),
          .heads = problem.heads,
          .kv_heads = problem.kv_heads,
          .queries = problem.query.size(2),
          .keys = problem.key.size(2),
          .head_dim = problem.head_dim,
          .value_dim = problem.value_dim,
          .dtype = problem.dtype()};
}

// The call on this rank's rows only. Packed rows are treated as one sequence, so that validation accepts their layout.
Problem own_problem(const CallRequest& request) {
  refuse_what_is_missing(request);
  const AttentionOptions options = without_lengths(request.options.attention);
  Call call = {.operation = request.operation,
               .query = request.query,
               .key = request.key,
               .value = request.value,
               .options = options};
  const auto rows = [](const ConstTensorView& view) { return view.rank() > 0 ? view.size(0) : 0; };
  const std::array<std::int64_t, 2> queries = {0, rows(request.query)}, keys = {0, rows(request.key)};
  if (request.options.packing) {
    call.cu_seqlens_q = ConstTensorView(queries, {2});
    call.cu_seqlens_k = ConstTensorView(keys, {2});
  }
  return request.checked(call);
}

// ---- What must be the same ----

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

void add_shared(Agreement& agreement, const CallRequest& request, const Sizes& sizes) {
  const Options& options = request.options;
  const AttentionOptions& of = options.attention;
  const auto given = [](bool is_given) { return is_given ? "given" : "none"; };
  agreement.same("the call", request.operation);
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
  agreement.same("spans", digest(of.spans));
  agreement.same("span_rows", of.span_rows);
  agreement.same("dropout", of.dropout);
  agreement.same("seed", text_of(of.seed));
  agreement.same("mask", of.mask.structured ? to_string(*of.mask.structured) : given(of.mask.has_value()));
  agreement.same("bias", given(of.bias.has_value()));
  agreement.same("dbias", given(request.gradients.dbias.has_value()));
  agreement.same("dsinks", given(request.gradients.dsinks.has_value()));
  agreement.same("cu_seqlens_q", digest(options.packing ? std::optional(options.packing->cu_seqlens_q) : std::nullopt));
  agreement.same("cu_seqlens_k", digest(options.packing ? std::optional(options.packing->cu_seqlens_k) : std::nullopt));
  agreement.same("scheme", name(options.scheme));
  agreement.same("the sharding", digest(options.sharding));
  const Cluster& cluster = options.cluster;
  agreement.same("the cluster",
                 text(cluster.ranks_per_node, " ", cluster.flops, " ", cluster.bandwidth, " ", cluster.latency, " ",
                      cluster.node_bandwidth, " ", cluster.node_latency, " ", cluster.call, " ", cluster.handling));
}

// ---- The schedule ----

// The shards, from the options and the sizes of the ranks' tensors.
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

Schedule schedule_of(const CallRequest& request, const Sizes& sizes, const Seen& seen, const Sharding& sharding) {
  const Options& options = request.options;
  const bool has_rows = (options.attention.mask || options.attention.bias) && !options.packing;
  const bool stays = options.scheme == Scheme::ring || options.scheme == Scheme::all_gather;
  if (has_rows && !stays && options.scheme != Scheme::automatic) {
    throw Unsupported(text(request.operation, ": scheme ", name(options.scheme),
                           " moves queries away from their rows of the mask or bias; use ring or all_gather"));
  }
  if (has_rows && options.scheme == Scheme::automatic) {
    return plan_among(std::span(all_schemes).first(2), sizes, seen, sharding, options.cluster, request.backward);
  }
  const bool turns = options.scheme == Scheme::pass_query && request.backward;  // the gradients go the other way
  return plan(turns ? Scheme::ring : options.scheme, sizes, seen, sharding, options.cluster, request.backward);
}

// ---- Masks, biases and spans ----

// The call that a mask or bias is of: this rank's queries and all keys; packed, all queries too.
BackwardProblem matrix_problem(const CallRequest& request, const Sizes& sizes) {
  AttentionOptions matrices;
  matrices.mask = std::optional<ConstTensorView>(request.options.attention.mask);
  matrices.bias = request.options.attention.bias;
  const std::optional<Packing>& packing = request.options.packing;
  const int rows = packing ? 0 : request.query.rank() - 2;
  const int heads = packing ? 1 : request.query.rank() - 3;
  const auto like_query = [&](std::int64_t width) {
    Dims result = request.query.sizes();
    result[rows] = packing ? sizes.queries : result[rows];
    result[result.size() - 1] = width;
    return result;
  };
  const auto like_key = [&](std::int64_t width) {
    Dims result = like_query(width);
    result[rows] = sizes.keys;
    if (result.size() == 4 || packing) {
      result[heads] = sizes.kv_heads;
    }
    return shape_only(sizes.dtype, result);
  };
  const Dims out = like_query(sizes.value_dim);
  const Dims of_rows = packing ? Dims{sizes.heads, sizes.queries} : Dims(std::span(out.begin(), out.end() - 1));
  Call call = {.operation = request.operation,
               .query = shape_only(sizes.dtype, like_query(sizes.head_dim)),
               .key = like_key(sizes.head_dim),
               .value = like_key(sizes.value_dim),
               .options = matrices};
  if (packing) {
    call.cu_seqlens_q = packing->cu_seqlens_q;
    call.cu_seqlens_k = packing->cu_seqlens_k;
  }
  const ConstTensorView like_out = shape_only(sizes.dtype, out);
  return backward_problem(call, like_out, like_out,
                          shape_only(sizes.dtype == DType::f64 ? DType::f64 : DType::f32, of_rows),
                          {.dbias = request.gradients.dbias});
}

void add_matrices(const CallRequest& request, const Sizes& sizes, AgreedCall& agreed) {
  const AttentionOptions& given = request.options.attention;
  if (!given.mask && !given.bias && !request.gradients.dbias) {
    return;
  }
  const BackwardProblem placed = matrix_problem(request, sizes);
  agreed.dbias = placed.dbias;
  if (!request.options.packing) {
    agreed.whole.own_mask = placed.mask;
    agreed.whole.own_bias = placed.bias;
    return;
  }
  agreed.whole.problem.bias = placed.bias;
  if (given.mask) {
    agreed.whole.problem.mask = placed.mask;
  }
}

// A view without the repetitions of its broadcast axes.
std::string stored_digest(const std::optional<ConstTensorView>& view) {
  if (!view) {
    return "none";
  }
  ConstTensorView stored = *view;
  for (int axis = 0; axis < stored.rank(); ++axis) {
    if (stored.stride(axis) == 0 && stored.size(axis) > 1) {
      stored = stored.slice(axis, 0, 1);
    }
  }
  return digest(stored);
}

// Whether ranks hold the same bias, so that its gradient is a sum over ranks and not rows of each rank. If every
// rank has one query, the two cannot be distinguished; then each rank has its own row.
bool bias_is_shared(const std::vector<std::vector<std::int64_t>>& lengths,
                    const std::vector<std::vector<std::int64_t>>& bias_rows) {
  bool repeats = true, single = true;
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    repeats &= bias_rows[rank].at(0) == 1;
    single &= lengths[rank].at(0) == 1;
  }
  return repeats && !single;
}

}  // namespace

AgreedCall agree(const CallRequest& request) {
  const Options& options = request.options;
  Agreement agreement(request.operation, request.transport);
  Problem own;
  Sizes sizes;
  agreement.attempt([&] {
    own = own_problem(request);
    sizes = sizes_of(own);
  });
  add_shared(agreement, request, sizes);
  agreement.own(sizes.queries);
  agreement.own(sizes.keys);
  const auto lengths = agreement.reach();
  const Sharding sharding = sharding_of(request.operation, options, lengths);
  sizes.queries = sizes.keys = 0;
  for (const auto& of_rank : lengths) {
    sizes.queries += of_rank[0];
    sizes.keys += of_rank[1];
  }
  AttentionOptions attention = options.attention;
  attention.mask.reset();  // a structured mask stays
  attention.bias.reset();
  attention.progress = [&transport = request.transport, inner = options.attention.progress](double share) {
    transport.progress();
    return !inner || inner(share);
  };
  AgreedCall agreed;
  agreed.query = own.query;
  agreed.key = own.key;
  agreed.value = own.value;
  const auto place = [&] {
    agreed.whole.problem = global_problem({request.operation, sizes, attention, options.packing,
                                           request.backward ? Pass::backward : Pass::forward, request.query.rank()});
  };
  if (options.attention.mask || options.attention.mask.structured || options.attention.bias) {
    // Sizes and contents of masks and biases differ between ranks, so ranks agree once more.
    Agreement on_masks(request.operation, request.transport);
    on_masks.attempt([&] {
      place();
      add_matrices(request, sizes, agreed);
    });
    on_masks.same("what the mask allows", stored_digest(agreed.whole.problem.spans));
    on_masks.own(agreed.dbias ? agreed.dbias->size(2) : 1);
    const auto bias_rows = on_masks.reach();
    agreed.bias_is_shared = options.packing || bias_is_shared(lengths, bias_rows);
  } else {
    place();
  }
  const Seen seen = seen_by(agreed.whole.problem);
  agreed.schedule = schedule_of(request, sizes, seen, sharding);
  return agreed;
}

}  // namespace headway::distributed
