// The end of decode: merging the partial softmaxes of a row's chunks, in pairs of neighbours and then pairs of those,
// an order that the number of chunks fixes; then out and lse.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/decode_partials.h"
#include "engines/cpu/kernel/row_end.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class DecodeFinish {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;

 public:
  explicit DecodeFinish(const DecodeArgs& args) : args_(args), partials_(args), to_log2_(decode_units(*args.heads)) {}

  HEADWAY_NOINLINE void run() {
    for (std::int64_t step = 1; step < args_.chunks; step *= 2) {
      for (std::int64_t chunk = 0; chunk + step < args_.chunks; chunk += 2 * step) {
        merge(chunk, chunk + step);
      }
    }
    for (std::int64_t row = 0; row < args_.rows(); ++row) {
      end_row(args_.heads[row / args_.queries], row, row % args_.queries);
    }
  }

 private:
  void merge(std::int64_t chunk, std::int64_t other) {
    for (std::int64_t row = 0; row < args_.rows(); ++row) {
      const std::int64_t from = partials_.at(other, row);
      partials_.round(from);
      partials_.absorb(partials_.at(chunk, row), partials_.references[from], partials_.sums[from],
                       partials_.outputs + from * partials_.ld, to_log2_);
    }
  }

  // Query i of a head. Its factor takes the place of its sum, for the weights.
  void end_row(const ForwardArgs& head, std::int64_t row, std::int64_t i) {
    partials_.round(row);
    Scalar& sum = partials_.sums[row];
    const RowSoftmax<Scalar> softmax{partials_.references[row], sum, to_log2_};
    double lse = 0;
    if (head.has_sink || sum == 0) {
      lse = end_unusual_row(head, i, range_of_row(head.ranges, i), softmax, sum);
    } else {
      lse = head.lse != nullptr ? usual_lse(softmax) : 0;
      sum = 1 / sum;
    }
    if (head.lse != nullptr) {
      static_cast<Scalar*>(head.lse)[i * head.lse_stride] = static_cast<Scalar>(lse);
    }
    const Vector factor = S::set(sum) * S::set(static_cast<Scalar>(head.dropout.kept_scale));
    In* out = static_cast<In*>(head.out.data) + i * head.out.row_stride;
    for (std::int64_t d = 0; d < head.value_dim; d += S::lanes) {
      // The sum with 0 gives every zero the same sign, which a value that counts for nothing may have changed.
      const Vector output = S::load(partials_.outputs + row * partials_.ld + d) + S::zero();
      store_row<S>(out, head.out.column_stride, d, at_most(head.value_dim - d, S::lanes), output * factor);
    }
  }

  const DecodeArgs& args_;
  const PartialSoftmaxes<S> partials_;
  double to_log2_;
};

}  // namespace
}  // namespace headway::cpu
