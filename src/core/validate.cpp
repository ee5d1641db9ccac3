// Every check of the contract; what passes here an engine may trust.
#include "core/validate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/elements.h"
#include "core/key_range.h"
#include "core/overlap.h"
#include "core/text.h"

namespace headway {
namespace {

// No axis is longer: sums of a few lengths then stay inside 64 bits, also where another axis is 0 and nothing is
// stored.
constexpr std::int64_t longest_axis = std::int64_t{1} << 60;

template <class... Parts>
[[noreturn]] void invalid(const Problem& problem, const Parts&... parts) {
  throw InvalidArgument(text(problem.operation, ": ", parts...));
}

template <class... Parts>
[[noreturn]] void mismatch(const Problem& problem, const Parts&... parts) {
  throw TypeMismatch(text(problem.operation, ": ", parts...));
}

// How the user's views map to [B,H,S,...]: rank 4 as it is; rank 3 lacks the heads, rank 2 the batch too; packed is
// [total,H,D].
struct Layout {
  int rank = 4;
  bool packed = false;
  std::int64_t batch = 0;

  // query, key, value, out and their gradients
  template <class View>
  View rows(const View& view) const {
    if (packed) {
      const View by_head = view.transpose(0, 1).unsqueeze(0);
      return by_head.expand({batch, by_head.size(1), by_head.size(2), by_head.size(3)});
    }
    return with_leading_axes(view);
  }

  // lse: [B,H,Sq] without the same axes; packed [H,total]
  template <class View>
  View row_values(const View& view) const {
    if (packed) {
      return view.unsqueeze(0).expand({batch, view.size(0), view.size(1)});
    }
    return with_leading_axes(view);
  }

  // mask, bias, weights, scores: [B,H,Sq,Sk] without the same axes
  template <class View>
  View matrix(const View& view) const {
    return packed ? view : with_leading_axes(view);
  }

  Dims matrix_sizes(const Problem& problem) const {
    if (packed || rank == 4) {
      return {problem.batch, problem.heads, problem.query_len, problem.key_len};
    }
    return rank == 3 ? Dims{problem.batch, problem.query_len, problem.key_len}
                     : Dims{problem.query_len, problem.key_len};
  }

 private:
  template <class View>
  View with_leading_axes(const View& view) const {
    if (rank == 4) {
      return view;
    }
    return rank == 3 ? view.unsqueeze(1) : view.unsqueeze(0).unsqueeze(0);
  }
};

void check_storage(const Problem& problem, const char* name, ConstTensorView view) {
  if (view.device() != problem.query.device()) {
    invalid(problem, name, " is on ", view.device(), ", query is on ", problem.query.device());
  }
  if (reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) != 0) {
    invalid(problem, name, " must be aligned to its element's ", size_of(view.dtype()), " bytes, found address ",
            view.data());
  }
}

void check_same_type(const Problem& problem, const char* name, ConstTensorView view) {
  if (view.dtype() != problem.dtype()) {
    mismatch(problem, name, " has type ", view.dtype(), ", query has ", problem.dtype());
  }
}

void check_float(const Problem& problem, const char* name, ConstTensorView view) {
  if (!is_float(view.dtype())) {
    mismatch(problem, name, " has type ", view.dtype(), ", expected f32, f64, bf16 or f16");
  }
}

void check_sizes(const Problem& problem, const char* name, ConstTensorView view, const Dims& expected) {
  if (view.sizes() != expected) {
    invalid(problem, name, " has shape ", view.sizes(), ", expected ", expected);
  }
}

// ---- Inputs ----

Layout input_layout(const Problem& problem, const Call& call) {
  Layout layout;
  layout.packed = call.cu_seqlens_q.has_value();
  layout.rank = call.query.rank();
  if (layout.packed && layout.rank != 3) {
    invalid(problem, "query must have 3 axes [total, heads, head_dim], found shape ", call.query.sizes());
  }
  if (layout.rank < 2 || layout.rank > 4) {
    invalid(problem,
            "query must have 4 axes [batch, heads, length, head_dim], or 3 or 2 without heads and batch, found shape ",
            call.query.sizes());
  }
  if (call.key.rank() != layout.rank) {
    invalid(problem, "key has shape ", call.key.sizes(), ", query has ", call.query.sizes(), ": expected as many axes");
  }
  if (call.value && call.value->rank() != layout.rank) {
    invalid(problem, "value has shape ", call.value->sizes(), ", query has ", call.query.sizes(),
            ": expected as many axes");
  }
  return layout;
}

void check_input_types(const Problem& problem, const Call& call) {
  check_float(problem, "query", call.query);
  check_same_type(problem, "key", call.key);
  check_storage(problem, "query", call.query);
  check_storage(problem, "key", call.key);
  if (call.value) {
    check_same_type(problem, "value", *call.value);
    check_storage(problem, "value", *call.value);
  }
}

// The checked number of sequences, and the length of the longest.
struct Packing {
  std::int64_t sequences = 0;
  std::int64_t longest = 0;
};

Packing check_cu_seqlens(const Problem& problem, const char* name, ConstTensorView lens, std::int64_t total) {
  if (!is_integer(lens.dtype())) {
    mismatch(problem, name, " has type ", lens.dtype(), ", expected i32 or i64");
  }
  check_storage(problem, name, lens);
  if (lens.rank() != 1 || lens.size(0) < 1) {
    invalid(problem, name, " must have shape (sequences + 1,), found ", lens.sizes());
  }
  Packing packing{lens.size(0) - 1, 0};
  std::int64_t previous = load_integer(lens, 0);
  if (previous != 0) {
    invalid(problem, name, "[0] is ", previous, ", expected 0");
  }
  for (std::int64_t b = 1; b < lens.size(0); ++b) {
    const std::int64_t current = load_integer(lens, b * lens.stride(0));
    if (current < previous || current > total) {
      invalid(problem, name, "[", b, "] is ", current, ", expected ", previous, " to ", total);
    }
    packing.longest = std::max(packing.longest, current - previous);
    previous = current;
  }
  if (previous != total) {
    invalid(problem, name, " ends at ", previous, ", expected the ", total, " rows that are packed");
  }
  return packing;
}

void place_packed(Problem& problem, const Call& call, Layout& layout) {
  const Packing queries = check_cu_seqlens(problem, "cu_seqlens_q", *call.cu_seqlens_q, call.query.size(0));
  const Packing keys = check_cu_seqlens(problem, "cu_seqlens_k", *call.cu_seqlens_k, call.key.size(0));
  if (queries.sequences != keys.sequences) {
    invalid(problem, "cu_seqlens_k has ", keys.sequences, " sequences, cu_seqlens_q has ", queries.sequences);
  }
  layout.batch = queries.sequences;
  problem.cu_seqlens_q = call.cu_seqlens_q;
  problem.cu_seqlens_k = call.cu_seqlens_k;
  problem.batch = queries.sequences;
  problem.query_len = queries.longest;
  problem.key_len = keys.longest;
}

void check_input_sizes(const Problem& problem) {
  const ConstTensorView &query = problem.query, &key = problem.key, &value = problem.value;
  for (const ConstTensorView& view : {query, key, value}) {
    if (*std::max_element(view.sizes().begin(), view.sizes().end()) > longest_axis) {
      invalid(problem, "expected sizes of at most 2^60, found shape ", view.sizes());
    }
  }
  if (key.size(0) != query.size(0)) {
    invalid(problem, "key has batch ", key.size(0), ", query has ", query.size(0));
  }
  if (value.size(0) != query.size(0)) {
    invalid(problem, "value has batch ", value.size(0), ", query has ", query.size(0));
  }
  if (key.size(3) != query.size(3)) {
    invalid(problem, "key has head_dim ", key.size(3), ", query has ", query.size(3));
  }
  if (value.size(2) != key.size(2)) {
    invalid(problem, "value has length ", value.size(2), ", key has ", key.size(2));
  }
  if (value.size(1) != key.size(1)) {
    invalid(problem, "value has ", value.size(1), " heads, key has ", key.size(1));
  }
  const bool divides = problem.kv_heads == 0 ? problem.heads == 0 : problem.heads % problem.kv_heads == 0;
  if (!divides) {
    invalid(problem, "query has ", problem.heads, " heads, expected a multiple of the ", problem.kv_heads,
            " heads of key and value");
  }
}

void place_inputs(Problem& problem, const Call& call, Layout& layout) {
  if (layout.packed) {
    place_packed(problem, call, layout);
  }
  problem.query = layout.rows(call.query);
  problem.key = layout.rows(call.key);
  if (call.value) {
    problem.value = layout.rows(*call.value);
  } else {  // attention_scores: values of width 0
    const Dims& sizes = problem.key.sizes();
    problem.value = ConstTensorView(nullptr, problem.dtype(), {sizes[0], sizes[1], sizes[2], 0}, problem.key.device());
  }
  problem.heads = problem.query.size(1);
  problem.kv_heads = problem.key.size(1);
  problem.head_dim = problem.query.size(3);
  problem.value_dim = problem.value.size(3);
  if (!layout.packed) {
    problem.batch = layout.batch = problem.query.size(0);
    problem.query_len = problem.query.size(2);
    problem.key_len = problem.key.size(2);
  }
  check_input_sizes(problem);
}

// ---- Options: key ranges ----

// Each entry of lens [B] or [B,Sq] must lie in 0 .. limit(b).
template <class Limit>
void check_lens(const Problem& problem, const char* name, ConstTensorView lens, const Limit& limit) {
  for (std::int64_t b = 0; b < lens.size(0); ++b) {
    const std::int64_t rows = lens.rank() == 2 ? lens.size(1) : 1;
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t value = load_integer(lens, b * lens.stride(0) + (lens.rank() == 2 ? i * lens.stride(1) : 0));
      if (value < 0 || value > limit(b)) {
        invalid(problem, name, "[", b, lens.rank() == 2 ? text(", ", i) : "", "] is ", value, ", expected 0 to ",
                limit(b));
      }
    }
  }
}

void check_integers(const Problem& problem, const char* name, ConstTensorView lens) {
  if (!is_integer(lens.dtype())) {
    mismatch(problem, name, " has type ", lens.dtype(), ", expected i32 or i64");
  }
  check_storage(problem, name, lens);
}

void resolve_valid_lens(Problem& problem, ConstTensorView lens, const Layout& layout) {
  check_integers(problem, "valid_lens", lens);
  const Dims per_row = {problem.batch, problem.query_len};
  ConstTensorView batched = lens;
  if (layout.rank == 2 && !layout.packed && lens.rank() < 2 && lens.sizes() != Dims{1}) {
    batched = lens.unsqueeze(0);  // no batch axis: a number, or one for each query
  }
  if (batched.sizes() != Dims{problem.batch} && batched.sizes() != per_row) {
    invalid(problem, "valid_lens has shape ", lens.sizes(), ", expected ", Dims{problem.batch}, " or ", per_row);
  }
  problem.valid_lens_per_batch = batched.rank() == 1;
  problem.valid_lens = problem.valid_lens_per_batch ? batched.unsqueeze(1).expand(per_row) : batched;
  check_lens(problem, "valid_lens", batched, [&](std::int64_t b) { return sequence(problem, b).key_count; });
}

void resolve_query_lens(Problem& problem, ConstTensorView lens) {
  check_integers(problem, "query_lens", lens);
  const ConstTensorView batched = lens.rank() == 0 && problem.batch == 1 ? lens.unsqueeze(0) : lens;
  check_sizes(problem, "query_lens", batched, {problem.batch});
  check_lens(problem, "query_lens", batched, [&](std::int64_t b) { return sequence(problem, b).query_count; });
  problem.query_lens = batched;
}

std::optional<std::int64_t> window_side(const Problem& problem, const char* side, std::optional<std::int64_t> width) {
  if (width && *width < 0) {
    invalid(problem, "window ", side, " is ", *width, ", expected 0 or more, or None for unlimited");
  }
  // Wider than all positions is as wide as them, and cannot overflow when positions are added.
  return width ? std::optional(std::min(*width, problem.query_len + problem.key_len)) : width;
}

void resolve_causal(Problem& problem, Causal causal) {
  problem.causal = causal;
  if (causal != Causal::square) {
    return;
  }
  problem.causal = Causal::top_left;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence current = sequence(problem, b);
    if (current.query_count != current.key_count) {
      invalid(problem, "causal is ambiguous with ", current.query_count, " queries and ", current.key_count,
              " keys: choose top_left or bottom_right");
    }
    if (!problem.packed()) {
      break;
    }
  }
}

void resolve_ranges(Problem& problem, const AttentionOptions& options, const Layout& layout) {
  resolve_causal(problem, options.causal);
  if (options.window) {
    problem.window_left = window_side(problem, "left", options.window->left);
    problem.window_right = window_side(problem, "right", options.window->right);
  }
  if (options.valid_lens) {
    resolve_valid_lens(problem, *options.valid_lens, layout);
  }
  if (options.query_lens) {
    resolve_query_lens(problem, *options.query_lens);
  }
}

// ---- Options: score modifiers ----

ConstTensorView broadcast_matrix(const Problem& problem, const char* name, ConstTensorView view, const Layout& layout) {
  check_storage(problem, name, view);
  const Dims target = layout.matrix_sizes(problem);
  try {
    return layout.matrix(view.expand(target));
  } catch (const InvalidArgument&) {
    invalid(problem, name, " has shape ", view.sizes(), ", which does not broadcast to ", target);
  }
}

ConstTensorView per_head(const Problem& problem, const char* name, ConstTensorView view) {
  check_float(problem, name, view);
  check_storage(problem, name, view);
  const ConstTensorView vector = view.rank() == 0 && problem.heads == 1 ? view.unsqueeze(0) : view;
  check_sizes(problem, name, vector, {problem.heads});
  return vector;
}

void resolve_scale(Problem& problem, const AttentionOptions& options) {
  const double natural = problem.head_dim > 0 ? 1.0 / std::sqrt(static_cast<double>(problem.head_dim)) : 1.0;
  problem.scale = options.scale.value_or(natural);
  if (!std::isfinite(problem.scale)) {
    invalid(problem, "scale is ", problem.scale, ", expected a finite number");
  }
  if (options.softcap && !(*options.softcap > 0 && std::isfinite(*options.softcap))) {
    invalid(problem, "softcap is ", *options.softcap, ", expected a finite number above 0");
  }
  problem.softcap = options.softcap;
}

void resolve_dropout(Problem& problem, const AttentionOptions& options) {
  if (!(options.dropout >= 0.0 && options.dropout <= 1.0)) {
    invalid(problem, "dropout is ", options.dropout, ", expected 0 to 1");
  }
  if (options.dropout > 0.0) {
    if (!options.seed) {
      invalid(problem, "dropout ", options.dropout, " needs a seed, found none");
    }
    problem.dropout = Dropout(options.dropout, *options.seed);
  }
}

void resolve_modifiers(Problem& problem, const AttentionOptions& options, const Layout& layout) {
  resolve_scale(problem, options);
  resolve_dropout(problem, options);
  if (options.mask) {
    if (options.mask->dtype() != DType::b8) {
      mismatch(problem, "mask has type ", options.mask->dtype(),
               ", expected bool (true = attend); additive masks go into bias");
    }
    problem.mask = broadcast_matrix(problem, "mask", *options.mask, layout);
  }
  if (options.bias) {
    check_float(problem, "bias", *options.bias);
    problem.bias = broadcast_matrix(problem, "bias", *options.bias, layout);
  }
  if (options.alibi_slopes) {
    problem.alibi_slopes = per_head(problem, "alibi_slopes", *options.alibi_slopes);
  }
  if (options.sinks) {
    problem.sinks = per_head(problem, "sinks", *options.sinks);
  }
}

template <class SomeProblem>
Layout resolve(SomeProblem& problem, const Call& call, Pass pass) {
  problem.operation = call.operation;
  problem.pass = pass;
  problem.query = call.query;  // what the first checks compare with
  check_input_types(problem, call);
  Layout layout = input_layout(problem, call);
  place_inputs(problem, call, layout);
  resolve_ranges(problem, call.options, layout);
  resolve_modifiers(problem, call.options, layout);
  problem.engine = call.options.engine;
  problem.progress = call.options.progress;
  return layout;
}

// ---- Outputs ----

struct Named {
  const char* name;
  ConstTensorView view;
};

// No output may share memory with an input, another output or itself.
void check_disjoint(const Problem& problem, const Call& call, const std::vector<Named>& outputs,
                    const std::vector<Named>& extra_inputs = {}) {
  std::vector<Named> others = {{"query", call.query}, {"key", call.key}};
  const auto add = [&](const char* name, const std::optional<ConstTensorView>& view) {
    if (view) {
      others.push_back({name, *view});
    }
  };
  add("value", call.value);
  add("mask", call.options.mask);
  add("bias", call.options.bias);
  add("valid_lens", call.options.valid_lens);
  add("query_lens", call.options.query_lens);
  add("alibi_slopes", call.options.alibi_slopes);
  add("sinks", call.options.sinks);
  add("cu_seqlens_q", call.cu_seqlens_q);
  add("cu_seqlens_k", call.cu_seqlens_k);
  others.insert(others.end(), extra_inputs.begin(), extra_inputs.end());
  for (const Named& output : outputs) {
    if (shares_memory_with_itself(output.view)) {
      invalid(problem, output.name, " has strides ", output.view.strides(), " for shape ", output.view.sizes(),
              ": two of its elements share memory");
    }
    for (const Named& other : others) {
      if (share_memory(output.view, other.view)) {
        invalid(problem, output.name, " overlaps ", other.name, " in memory");
      }
    }
    others.push_back(output);
  }
}

Dims rows_sizes(const Problem& problem, const Call& call) {
  Dims sizes = call.query.sizes();
  sizes[sizes.size() - 1] = problem.value_dim;
  return sizes;
}

Dims lse_sizes(const Problem& problem, const Call& call) {
  if (problem.packed()) {
    return {problem.heads, call.query.size(0)};
  }
  const Dims& sizes = call.query.sizes();
  return Dims(std::span(sizes.begin(), sizes.end() - 1));
}

ConstTensorView checked_lse(const Problem& problem, const Call& call, ConstTensorView lse) {
  const DType expected = problem.dtype() == DType::f64 ? DType::f64 : DType::f32;
  if (lse.dtype() != expected) {
    mismatch(problem, "lse has type ", lse.dtype(), ", expected ", expected, " for ", problem.dtype(), " inputs");
  }
  check_storage(problem, "lse", lse);
  check_sizes(problem, "lse", lse, lse_sizes(problem, call));
  return lse;
}

// The view with axes of size 1 in front.
TensorView with_rank(TensorView view, int rank) {
  while (view.rank() < rank) {
    view = view.unsqueeze(0);
  }
  return view;
}

ConstTensorView checked_rows(const Problem& problem, const char* name, ConstTensorView view, const Dims& sizes) {
  check_same_type(problem, name, view);
  check_storage(problem, name, view);
  check_sizes(problem, name, view, sizes);
  return view;
}

}  // namespace

Problem inputs_problem(const Call& call, Pass pass) {
  Problem problem;
  resolve(problem, call, pass);
  return problem;
}

ForwardProblem forward_problem(const Call& call, TensorView out, const AttentionOutputs& outputs) {
  ForwardProblem problem;
  const Layout layout = resolve(problem, call, Pass::forward);
  std::vector<Named> written = {{"out", checked_rows(problem, "out", out, rows_sizes(problem, call))}};
  problem.out = layout.rows(out);
  if (outputs.lse) {
    written.push_back({"lse", checked_lse(problem, call, *outputs.lse)});
    problem.lse = layout.row_values(*outputs.lse);
    problem.wants_lse = true;
  }
  if (outputs.weights) {
    if (problem.packed()) {
      invalid(problem,
              "weights of packed sequences have no one shape; ask for them sequence by sequence with attention");
    }
    written.push_back({"weights", checked_rows(problem, "weights", *outputs.weights, layout.matrix_sizes(problem))});
    problem.weights = layout.matrix(*outputs.weights);
    problem.wants_weights = true;
  }
  check_disjoint(problem, call, written);
  return problem;
}

BackwardProblem backward_problem(const Call& call, ConstTensorView grad_out, ConstTensorView out, ConstTensorView lse,
                                 const AttentionGradients& gradients) {
  BackwardProblem problem;
  const Layout layout = resolve(problem, call, Pass::backward);
  const Dims rows = rows_sizes(problem, call);
  problem.grad_out = layout.rows(checked_rows(problem, "grad_out", grad_out, rows));
  problem.out = layout.rows(checked_rows(problem, "out", out, rows));
  problem.lse = layout.row_values(checked_lse(problem, call, lse));

  std::vector<Named> written;
  const auto place = [&](const char* name, const std::optional<TensorView>& view, const ConstTensorView& like,
                         std::optional<TensorView>& placed) {
    if (view) {
      written.push_back({name, checked_rows(problem, name, *view, like.sizes())});
      placed = layout.rows(*view);
    }
  };
  place("dq", gradients.dq, call.query, problem.dq);
  place("dk", gradients.dk, call.key, problem.dk);
  place("dv", gradients.dv, *call.value, problem.dv);
  if (gradients.dbias) {
    if (!call.options.bias) {
      invalid(problem, "dbias was asked for, but the call has no bias");
    }
    check_float(problem, "dbias", *gradients.dbias);
    check_storage(problem, "dbias", *gradients.dbias);
    check_sizes(problem, "dbias", *gradients.dbias, call.options.bias->sizes());
    written.push_back({"dbias", *gradients.dbias});
    problem.dbias = layout.matrix(with_rank(*gradients.dbias, layout.matrix_sizes(problem).size()));
  }
  if (gradients.dsinks) {
    if (!call.options.sinks) {
      invalid(problem, "dsinks was asked for, but the call has no sinks");
    }
    per_head(problem, "dsinks", *gradients.dsinks);
    written.push_back({"dsinks", *gradients.dsinks});
    problem.dsinks = gradients.dsinks->rank() == 0 ? gradients.dsinks->unsqueeze(0) : *gradients.dsinks;
  }
  check_disjoint(problem, call, written, {{"grad_out", grad_out}, {"out", out}, {"lse", lse}});
  return problem;
}

ScoresProblem scores_problem(const Call& call, TensorView scores, Stage stage) {
  ScoresProblem problem;
  const Layout layout = resolve(problem, call, Pass::scores);
  const ConstTensorView checked = checked_rows(problem, "scores", scores, layout.matrix_sizes(problem));
  check_disjoint(problem, call, {{"scores", checked}});
  problem.scores = layout.matrix(scores);
  problem.stage = stage;
  return problem;
}

}  // namespace headway
