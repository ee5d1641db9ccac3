#include "distributed/gradient_sums.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "core/elements.h"
#include "core/key_range.h"
#include "distributed/row_math.h"

namespace headway::distributed {
namespace {

// The sums of all ranks, added in their order: the same bits on each.
void add_over_ranks(Transport& transport, std::span<double> sums) {
  const std::string mine(reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(double));
  std::fill(sums.begin(), sums.end(), 0.0);
  for (const std::string& text : transport.all_gather(mine)) {
    for (std::size_t n = 0; n < sums.size(); ++n) {
      double of_rank = 0;
      std::memcpy(&of_rank, text.data() + n * sizeof(double), sizeof(double));
      sums[n] += of_rank;
    }
  }
}

// <grad_out, out> of a row.
double row_product(const BackwardRun& run, std::int64_t b, std::int64_t h, std::int64_t i) {
  const std::int64_t first = row_offset(run.out, b, h, i), first_of_grad = row_offset(run.grad_out, b, h, i);
  return with_float_type(run.out.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* out = static_cast<const T*>(run.out.data()) + first;
    const T* grad_out = static_cast<const T*>(run.grad_out.data()) + first_of_grad;
    double sum = 0;
    for (std::int64_t c = 0; c < run.sizes().value_dim; ++c) {
      sum += converted<double>(out[c * run.out.stride(3)]) * converted<double>(grad_out[c * run.grad_out.stride(3)]);
    }
    return sum;
  });
}

// Which of this rank's rows have an allowed key: those with a finite lse where every score is its bias. Computed when
// it is first asked for.
class RowsWithKeys {
 public:
  explicit RowsWithKeys(const Run& run) : run_(run) {}

  bool has(std::int64_t b, std::int64_t h, std::int64_t i) {
    if (!lse_) {
      compute();
    }
    return load_float(*lse_, (b * lse_->size(1) + h) * lse_->size(2) + i) != -std::numeric_limits<double>::infinity();
  }

 private:
  void compute() {
    Whole whole = run_.without_sinks();
    Problem& problem = whole.problem;
    problem.head_dim = problem.value_dim = 0;
    problem.scale = 1;
    problem.softcap.reset();
    problem.alibi_slopes.reset();
    problem.dropout = {};
    const Sizes& sizes = run_.sizes();
    const Tensor keys({sizes.batch, sizes.kv_heads, sizes.keys, 0}, sizes.dtype);
    Tensor out({sizes.batch, sizes.heads, run_.query.size(2), 0}, sizes.dtype);
    lse_.emplace(Dims{sizes.batch, sizes.heads, run_.query.size(2)}, run_.accumulator());
    std::int64_t first = 0;
    for (const Rows& rows : run_.queries()) {
      const std::int64_t last = first + rows.count();
      const Part part{rows, {0, sizes.keys}, first, run_.query.slice(2, first, last).slice(3, 0, 0), keys, keys};
      forward_part(whole, part, out.view().slice(2, first, last), lse_->view().slice(2, first, last));
      first = last;
    }
  }

  const Run& run_;
  std::optional<Tensor> lse_;  // [B,H,rows]
};

}  // namespace

// - sum over rows with a key of exp(sink - lse) <grad_out, out>. What grad_out holds in rows without keys is ignored.
void store_sink_gradient(const BackwardRun& run, const ConstTensorView& sinks, TensorView dsinks) {
  const Sizes& sizes = run.sizes();
  std::vector<double> sums(static_cast<std::size_t>(sizes.heads));
  RowsWithKeys rows_with_keys(run);
  for (std::int64_t h = 0; h < sizes.heads; ++h) {
    // Rounded as lse is, so that a sink that makes all of a large lse is equal to it.
    const double given = load_float(sinks, h * sinks.stride(0));
    const double sink = run.lse.dtype() == DType::f32 ? double{static_cast<float>(given)} : given;
    for (std::int64_t b = 0; b < sizes.batch; ++b) {
      for (std::int64_t i = 0; i < run.query.size(2); ++i) {
        const double lse = load_float(run.lse, b * run.lse.stride(0) + h * run.lse.stride(1) + i * run.lse.stride(2));
        if (lse == -std::numeric_limits<double>::infinity()) {  // neither a key nor a sink
          continue;
        }
        const double weight = std::isinf(sink) && sink == lse ? 1 : std::exp(sink - lse);
        const double term = weight * row_product(run, b, h, i);
        if (term != 0 && (std::isfinite(term) || rows_with_keys.has(b, h, i))) {  // without keys out is 0
          sums[static_cast<std::size_t>(h)] -= term;
        }
      }
    }
  }
  add_over_ranks(run.transport, sums);
  for (std::int64_t h = 0; h < sizes.heads; ++h) {
    store_float(dsinks, h * dsinks.stride(0), sums[static_cast<std::size_t>(h)]);
  }
}

void store_bias_gradient(Transport& transport, const Tensor& sums, bool of_all_ranks, TensorView dbias) {
  if (!of_all_ranks) {
    copy_rows(sums, dbias);
    return;
  }
  std::vector<double> totals(sums.as<double>(), sums.as<double>() + sums.elements());
  add_over_ranks(transport, totals);
  copy_rows(ConstTensorView(totals, sums.sizes()), dbias);
}

}  // namespace headway::distributed
