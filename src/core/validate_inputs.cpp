// Inputs and options: every check of the contract on them, and their place in a Problem.
#include "core/validate_inputs.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "core/ceil_div.h"
#include "core/checks.h"
#include "core/elements.h"
#include "core/key_range.h"
#include "core/spans.h"
#include "core/structured_mask.h"
#include "core/text.h"

namespace headway {

// ---- Checks that pages have too ----

void check_integers(const Problem& problem, const char* name, ConstTensorView lens) {
  if (!is_integer(lens.dtype())) {
    mismatch(problem, name, " has type ", lens.dtype(), ", expected i32 or i64");
  }
  if (!on_host(lens)) {
    check_device(problem, name, lens);
  }
  check_alignment(problem, name, lens);
}

Packing check_cu_seqlens(const Problem& problem, const char* name, ConstTensorView lens, std::int64_t total) {
  check_integers(problem, name, lens);
  if (lens.rank() != 1 || lens.size(0) < 1) {
    invalid(problem, name, " must have shape (sequences + 1,), found ", lens.sizes());
  }
  Packing packing{lens.size(0) - 1, 0};
  if (!on_host(lens)) {
    packing.longest = total;
    return packing;
  }
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

void check_axes(const Problem& problem) {
  const ConstTensorView &query = problem.query, &key = problem.key, &value = problem.value;
  for (const ConstTensorView& view : {query, key, value}) {
    if (*std::max_element(view.sizes().begin(), view.sizes().end()) > longest_axis) {
      invalid(problem, "expected sizes of at most 2^60, found shape ", view.sizes());
    }
  }
  // Rows of width 0 take no memory, but are counted.
  for (const ConstTensorView& view : {query, key}) {
    std::int64_t rows = 0;
    if (view.size(0) != 0 && (__builtin_mul_overflow(view.size(0), view.size(1), &rows) ||
                              __builtin_mul_overflow(rows, std::max<std::int64_t>(view.size(2), 1), &rows))) {
      invalid(problem, "expected fewer than 2^63 rows, found shape ", view.sizes());
    }
  }
}

void check_heads(const Problem& problem) {
  const bool divides = problem.kv_heads == 0 ? problem.heads == 0 : problem.heads % problem.kv_heads == 0;
  if (!divides) {
    invalid(problem, "query has ", problem.heads, " heads, expected a multiple of the ", problem.kv_heads,
            " heads of key and value");
  }
}

namespace {

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

void place_packed(Problem& problem, const Call& call, Layout& layout) {
  const Packing queries = check_cu_seqlens(problem, "cu_seqlens_q", *call.cu_seqlens_q, call.query.size(0));
  const Packing keys = check_cu_seqlens(problem, "cu_seqlens_k", *call.cu_seqlens_k, call.key.size(0));
  if (queries.sequences != keys.sequences) {
    invalid(problem, "cu_seqlens_k has ", keys.sequences, " sequences, cu_seqlens_q has ", queries.sequences);
  }
  if (call.cu_seqlens_q->device() != call.cu_seqlens_k->device()) {
    invalid(problem, "cu_seqlens_k is on ", call.cu_seqlens_k->device(), ", cu_seqlens_q is on ",
            call.cu_seqlens_q->device());
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
  check_axes(problem);
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
  check_heads(problem);
}

Layout place_inputs(Problem& problem, const Call& call) {
  check_input_types(problem, call);
  Layout layout = input_layout(problem, call);
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
  return layout;
}

// ---- Options: key ranges ----

// Each entry of lens [B] or [B,Sq] must lie in 0 .. limit(b). Checked before they enter the problem, because sequence()
// computes with them.
template <class Limit>
void check_lens(const Problem& problem, const char* name, ConstTensorView lens, const Limit& limit) {
  if (!on_host(lens)) {
    return;
  }
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
  check_lens(problem, "valid_lens", batched, [&](std::int64_t b) { return sequence(problem, b).key_count; });
  problem.valid_lens_per_batch = batched.rank() == 1;
  problem.valid_lens = problem.valid_lens_per_batch ? batched.unsqueeze(1).expand(per_row) : batched;
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
  // A window wider than all positions is cut to their number, so that adding positions to it cannot overflow.
  return width ? std::optional(std::min(*width, problem.query_len + problem.key_len)) : width;
}

void resolve_causal(Problem& problem, Causal causal) {
  require_enumerator(problem, "causal", causal, Causal::bottom_right);
  problem.causal = causal;
  if (causal != Causal::square) {
    return;
  }
  problem.causal = Causal::top_left;
  if ((problem.packed() && !on_host(*problem.cu_seqlens_q)) || (problem.pages && !on_host(problem.pages->lengths))) {
    return;
  }
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence current = sequence(problem, b);
    if (current.query_count != current.key_count) {
      invalid(problem, "causal is ambiguous with ", current.query_count, " queries and ", current.key_count,
              " keys: choose top_left or bottom_right");
    }
    if (!problem.lengths_vary()) {
      break;
    }
  }
}

// The sizes that spans broadcast to, with the axes that the query has; packed sequences share one row axis.
Dims spans_sizes(const Problem& problem, const Layout& layout, std::int64_t spans) {
  const std::int64_t rows = layout.packed ? problem.query.size(2) : ceil_div(problem.query_len, problem.span_rows);
  if (layout.packed || layout.rank == 4) {
    return {layout.packed ? 1 : problem.batch, problem.heads, rows, spans, 2};
  }
  return layout.rank == 3 ? Dims{problem.batch, rows, spans, 2} : Dims{rows, spans, 2};
}

void resolve_spans(Problem& problem, ConstTensorView spans, const Layout& layout) {
  check_integers(problem, "spans", spans);
  const int rank = spans.rank();
  const Dims target = spans_sizes(problem, layout, rank < 3 ? 1 : spans.size(rank - 2));
  const int axes = target.size();
  bool fits = rank >= 3 && rank <= axes && spans.size(rank - 1) == 2 && spans.size(rank - 3) == target[axes - 3];
  for (int axis = 0; fits && axis < rank - 3; ++axis) {
    fits = spans.size(axis) == 1 || spans.size(axis) == target[axes - rank + axis];
  }
  if (!fits) {
    invalid(problem, "spans has shape ", spans.sizes(), ", expected ", target,
            " for any number of spans, or 1 for batch and heads",
            problem.span_rows == 1 ? "" : text(", with span_rows ", problem.span_rows));
  }
  if (spans.stride(rank - 2) == 0 && spans.size(rank - 2) > 1) {  // one span, however often it repeats
    resolve_spans(problem, spans.slice(rank - 2, 0, 1), layout);
    return;
  }
  ConstTensorView placed = layout.matrix(spans.expand(target));
  if (layout.packed) {
    placed = placed.expand({problem.batch, target[1], target[2], target[3], 2});
  }
  if (on_host(spans)) {
    take_spans(problem, placed);
  } else {
    problem.spans = placed;
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
  if (options.span_rows < 1 || (problem.packed() && options.span_rows != 1)) {
    invalid(problem, "span_rows is ", options.span_rows, ", expected 1",
            problem.packed() ? " for packed sequences" : " or more");
  }
  problem.span_rows = std::clamp<std::int64_t>(options.span_rows, 1, std::max<std::int64_t>(problem.query_len, 1));
  if (options.spans) {
    resolve_spans(problem, *options.spans, layout);
  } else if (options.span_rows != 1) {
    invalid(problem, "span_rows is ", options.span_rows, ", but the call has no spans");
  }
}

void resolve_structured_mask(Problem& problem, const AttentionOptions& options) {
  if (!options.mask.structured) {
    return;
  }
  if (options.spans) {
    invalid(problem, "found spans and a structured mask, expected one: masks.spans(array) & mask joins them");
  }
  problem.stream = options.stream;
  take_mask(problem, *options.mask.structured);
}

// ---- Options: score modifiers ----

// What a matrix for each batch item lacks, [B,Sk] or [B,Sq,Sk] in place of `target` [B,H,Sq,Sk]: a hint, or nothing.
std::string missing_axes(const Dims& found, const Dims& target) {
  if (target.size() != 4) {
    return {};
  }
  if (found == Dims{target[0], target[3]}) {
    return text("; if it says which keys each batch item has, make it ", Dims{target[0], 1, 1, target[3]});
  }
  if (found == Dims{target[0], target[2], target[3]}) {
    return text("; if it is one matrix for each batch item, make it ", Dims{target[0], 1, target[2], target[3]});
  }
  return {};
}

ConstTensorView broadcast_matrix(const Problem& problem, const char* name, ConstTensorView view, const Layout& layout) {
  check_storage(problem, name, view);
  const Dims target = layout.matrix_sizes(problem);
  try {
    return layout.matrix(view.expand(target));
  } catch (const InvalidArgument&) {
    invalid(problem, name, " has shape ", view.sizes(), ", which does not broadcast to ", target,
            missing_axes(view.sizes(), target));
  }
}

void resolve_scale(Problem& problem, const AttentionOptions& options) {
  problem.scale = options.scale.value_or(natural_scale(problem.head_dim));
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

}  // namespace

Layout resolve(Problem& problem, const Call& call, Pass pass) {
  problem.operation = call.operation;
  problem.pass = pass;
  problem.query = call.query;  // what the first checks compare with
  const Layout layout = call.pages != nullptr ? place_paged(problem, call) : place_inputs(problem, call);
  resolve_ranges(problem, call.options, layout);
  resolve_modifiers(problem, call.options, layout);
  resolve_structured_mask(problem, call.options);
  require_enumerator(problem, "engine", call.options.engine, Engine::cuda);
  problem.engine = call.options.engine;
  problem.progress = call.options.progress;
  problem.stream = call.options.stream;
  problem.batch_invariant = call.options.batch_invariant;
  return layout;
}

}  // namespace headway
