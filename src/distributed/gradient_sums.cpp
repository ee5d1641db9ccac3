#include "distributed/gradient_sums.h"

#include <cmath>
#include <cstring>
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

}  // namespace

// - sum over rows of exp(sink - lse) <grad_out, out>.
void store_sink_gradient(const BackwardRun& run, const ConstTensorView& sinks, TensorView dsinks) {
  const std::int64_t heads = run.sizes().heads;
  std::vector<double> sums(static_cast<std::size_t>(heads));
  for (std::int64_t h = 0; h < heads; ++h) {
    const double sink = load_float(sinks, h * sinks.stride(0));
    const double stored_sink = run.lse.dtype() == DType::f32 ? static_cast<float>(sink) : sink;
    for (std::int64_t b = 0; b < run.sizes().batch; ++b) {
      for (std::int64_t i = 0; i < run.query.size(2); ++i) {
        const double lse = load_float(run.lse, b * run.lse.stride(0) + h * run.lse.stride(1) + i * run.lse.stride(2));
        double delta = 0;
        for (std::int64_t c = 0; c < run.sizes().value_dim && !std::isinf(lse); ++c) {
          const double out = load_float(run.out, row_offset(run.out, b, h, i) + c * run.out.stride(3));
          // A row without keys has out 0, and its grad_out is ignored.
          delta += out == 0 && lse == stored_sink
                       ? 0
                       : out * load_float(run.grad_out, row_offset(run.grad_out, b, h, i) + c * run.grad_out.stride(3));
        }
        sums[static_cast<std::size_t>(h)] -= delta == 0 ? 0 : std::exp(sink - lse) * delta;
      }
    }
  }
  add_over_ranks(run.transport, sums);
  for (std::int64_t h = 0; h < heads; ++h) {
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
