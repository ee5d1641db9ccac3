// Arithmetic on [B,H,rows,columns] views of float types, on all threads: copies, sums, and the merge of partial
// results.
#pragma once

#include <optional>

#include "headway/distributed.h"

namespace headway::distributed {

void copy_rows(ConstTensorView from, TensorView to);  // converts
void add_rows(ConstTensorView from, TensorView to);   // to += from
Tensor as_type(ConstTensorView from, DType dtype);    // contiguous

// The lse of a part of a row whose allowed scores are all -inf there.
double lowest_lse(DType type);

// Merges rows whose keys come in parts. Each part has its own normalised out and lse, in the accumulator's type, from
// forward_part_of_rows. Sums are double, so that many parts are as exact as one, and parts are added in the caller's
// order.
class RowMerge {
 public:
  RowMerge(std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t width);

  // [B,H,rows,width] and [B,H,rows], of rows [first_row, first_row + rows).
  void add(ConstTensorView out, ConstTensorView lse, std::int64_t first_row = 0);

  // What was added so far, as one part of a longer merge.
  void store_part(TensorView out, TensorView lse) const;

  // sinks [H] are counted for every row but the padding, [B * rows] where there is some.
  void finish(const std::optional<ConstTensorView>& sinks, const std::vector<bool>* padding, TensorView out,
              TensorView lse) const;

 private:
  void store(bool as_part, const std::optional<ConstTensorView>& sinks, const std::vector<bool>* padding,
             TensorView out, TensorView lse) const;

  std::int64_t batch_, heads_, rows_, width_;
  Tensor sums_;     // [B,H,rows,width] f64: sum of exp(lse - highest) * out
  Tensor highest_;  // [B,H,rows] f64: the largest lse so far
  Tensor totals_;   // [B,H,rows] f64: sum of exp(lse - highest)
};

}  // namespace headway::distributed
