// From a call to a valid Problem; the second half of validation: what is written, and where.
#include "core/validate.h"

#include <cstdint>
#include <vector>

#include "core/checks.h"
#include "core/overlap.h"
#include "core/validate_inputs.h"

namespace headway {
namespace {

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
  add("spans", call.options.spans);
  add("alibi_slopes", call.options.alibi_slopes);
  add("sinks", call.options.sinks);
  add("cu_seqlens_q", call.cu_seqlens_q);
  add("cu_seqlens_k", call.cu_seqlens_k);
  if (call.pages != nullptr) {
    add("block_table", call.pages->block_table);
    add("lengths", call.pages->lengths);
    add("key_scales", call.pages->key_scales);
    add("value_scales", call.pages->value_scales);
  }
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
    check_lse(problem, *outputs.lse, lse_sizes(problem, call));
    written.push_back({"lse", *outputs.lse});
    problem.lse = layout.row_values(*outputs.lse);
    problem.wants_lse = true;
  }
  if (outputs.weights) {
    if (problem.lengths_vary()) {
      invalid(problem, "weights of ", problem.pages ? "sequences in pages" : "packed sequences",
              " have no one shape; ask for them sequence by sequence with attention");
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
  check_lse(problem, lse, lse_sizes(problem, call));
  problem.lse = layout.row_values(lse);

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
  require_enumerator(problem, "stage", stage, Stage::weights);
  problem.scores = layout.matrix(scores);
  problem.stage = stage;
  return problem;
}

}  // namespace headway
