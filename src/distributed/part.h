// Parts of the whole call on this rank's engine: some query rows against some key rows, positions counted over the
// whole.
#pragma once

#include <cstdint>
#include <optional>

#include "core/problem.h"
#include "headway/distributed.h"

namespace headway::distributed {

// The whole call, and this rank's part of its mask and bias.
struct Whole {
  // Without data, and without sinks if parts are merged, since merging counts them once. Its mask and bias are those
  // that every rank has completely: of packed sequences, and the bools of structured masks.
  Problem problem;
  // [B,H,this rank's queries, all keys]
  std::optional<ConstTensorView> own_mask;
  std::optional<ConstTensorView> own_bias;

  // The same for some of the heads.
  Whole of_heads(Rows heads, Rows kv_heads) const;
};

// [B,H,n,D], [B,Hkv,m,D], [B,Hkv,m,Dv]; packed: B = 1.
struct Part {
  Rows queries, keys;          // of the whole
  std::int64_t first_row = 0;  // of the queries among this rank's, for mask and bias
  ConstTensorView query, key, value;
  bool of_longer_rows = false;  // backward: as in BackwardProblem
};

// out [B,H,n,Dv], lse [B,H,n]: for these keys only. Rows that see none of them are 0 and -inf.
void forward_part(const Whole& whole, const Part& part, TensorView out, TensorView lse);

// The same for parts that RowMerge adds up. A row whose allowed scores are all -inf (from infinite inputs) has the lse
// lowest_lse (row_math.h): keys of other parts, or a sink, may have finite scores, beside which these weigh 0.
void forward_part_of_rows(const Whole& whole, const Part& part, TensorView out, TensorView lse);

// Gradients of the part's own scores, with the out and lse of the whole row. dq, dk and dv are of the part's rows and
// of one type; they are overwritten. The part's gradient of the bias is added to bias_sums, f64, which has the axes of
// the whole bias or of this rank's, or 1 for axes to sum over.
struct PartGradients {
  TensorView dq, dk, dv;
  std::optional<TensorView> bias_sums = {};
};
void backward_part(const Whole& whole, const Part& part, ConstTensorView grad_out, ConstTensorView out,
                   ConstTensorView lse, const PartGradients& gradients);

}  // namespace headway::distributed
