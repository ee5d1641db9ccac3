// What coarse rows (plain_rows.cuh) bring to the gradients of query, key and value, and their statistics for those of
// bias and sinks. Runs behind the kernels for all pairs, which left these rows out.
//
// A block has the coarse rows of one kv head and a slice of its keys. It first finds every row's statistics, as the
// other slices' blocks do: they write the same bits. Then a warp takes a row of dq, or a key, and walks over 32 pairs
// at a time, of which each lane makes the coefficients; sums run in one order. Nothing of this is fast, and where there
// are no coarse rows a block ends when it has seen so.
#include <algorithm>

#include "engines/cuda/kernels/coarse_rows.cuh"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"

namespace headway::cuda {
namespace {

constexpr int each = 4;  // features of a lane at a time

template <class T>
class CoarseGradients : private CoarseBlock<T, CoarseGradientArguments> {
  using Base = CoarseBlock<T, CoarseGradientArguments>;
  using Base::args_;
  using Base::b_;
  using Base::lane_;
  using Base::warp_;
  using typename Base::Real;

 public:
  __device__ CoarseGradients(const CoarseGradientArguments& args, std::int64_t b, std::int64_t g)
      : Base(args, b), g_(g) {}

  __device__ void run(std::int64_t slice, std::int64_t slices) {
    for_rows(warp_, coarse_warps, [&](const PlainHead<T>& head, std::int64_t h, std::int64_t i) { find(head, h, i); });
    __syncthreads();
    if (args_.query_gradient.data != nullptr) {
      for_rows(slice * coarse_warps + warp_, slices * coarse_warps,
               [&](const PlainHead<T>& head, std::int64_t h, std::int64_t i) { differentiate_query(head, h, i); });
    }
    const std::int64_t keys = sequence_of(args_, b_).key_count;
    for (std::int64_t j = slice * coarse_warps + warp_; j < keys; j += slices * coarse_warps) {
      differentiate_key(j);
    }
  }

 private:
  struct Coefficients {
    bool allowed = false, kept = false;         // kept: by dropout, of what is allowed
    double weight = 0.0, score_gradient = 0.0;  // p with dropout, and ds
  };

  // visit(head, h, i) for the coarse rows whose number is `first` modulo `step`, by all lanes of a warp.
  template <class Visit>
  __device__ void for_rows(std::int64_t first, std::int64_t step, const Visit& visit) const {
    for (std::int64_t h = g_ * args_.group; h < (g_ + 1) * args_.group; ++h) {
      const PlainHead<T> head(args_, b_, h);
      for (std::int64_t tile = 0; tile < args_.coarse.tiles; ++tile) {
        if (args_.coarse.found[(b_ * args_.heads + h) * args_.coarse.tiles + tile] == 0) {
          continue;
        }
        const std::int64_t begin = tile * args_.coarse.tile_rows;
        for (std::int64_t i = begin; i < smaller(begin + args_.coarse.tile_rows, head.sequence().real_queries); ++i) {
          if (i % step == first && is_coarse(args_.coarse, lse_of(head, h, i))) {
            visit(head, h, i);
          }
        }
      }
    }
  }

  __device__ Real lse_of(const PlainHead<T>& head, std::int64_t h, std::int64_t i) const {
    return Base::lse_of(h, head.sequence().query_begin + i);
  }
  __device__ CoarseRow<Real>& row_of(const PlainHead<T>& head, std::int64_t h, std::int64_t i) const {
    return coarse_row<Real>(args_.coarse, b_, h, head.sequence().query_begin + i);
  }

  // The statistics of a row.
  __device__ void find(const PlainHead<T>& head, std::int64_t h, std::int64_t i) const {
    const Real lse = lse_of(head, h, i);
    CoarseRow<Real> row{{lse, lse}, {lse, lse}, lse};  // of NaN, which all that the row gives is
    if (lse == lse) {
      const Real sink = sink_of<Real>(args_, h);
      row.weights = weight_base(head.softmax(i, lane_), sink);
      if (args_.of_bias) {
        row.ordered_weights = weight_base(head.template softmax<Summing::in_order>(i, lane_), sink);
      }
      row.delta = warp_delta(head.query_row(args_.grad_out, i), args_.grad_out.feature, head.query_row(args_.out, i),
                             args_.out.feature, args_.value_dim, lane_);
    }
    if (lane_ == 0) {
      row_of(head, h, i) = row;
    }
    __syncwarp();
  }

  __device__ Coefficients coefficients(const PlainHead<T>& head, std::int64_t h, std::int64_t i, std::int64_t j) const {
    Coefficients result;
    const CoarseRow<Real> row = row_of(head, h, i);
    const bool kept = !args_.dropout.active || is_kept(args_.dropout, b_, h, i, j);
    if (row.weights.base != row.weights.base) {
      result.allowed = head.is_allowed(i, j);
      result.weight = result.score_gradient = static_cast<double>(row.weights.base);
    } else {
      Real slope;
      const Real score = head.score(i, j, slope);
      const bool tiny_cap = sizeof(Real) == sizeof(float) && args_.softcap != 0 && args_.softcap < FLT_MIN;
      result.allowed = score != -infinity<Real>();
      const double p = exponential(score - row.weights.base) * row.weights.factor;
      const double dp = kept ? plain_product(head.query_row(args_.grad_out, i), args_.grad_out.feature,
                                             head.key_row(args_.value, j), args_.value.feature, args_.value_dim) *
                                   args_.dropout.kept_scale
                             : 0.0;
      result.weight = p * args_.dropout.kept_scale;
      result.score_gradient =
          p * (dp - static_cast<double>(row.delta)) * (tiny_cap ? head.slope(i, j) : static_cast<double>(slope));
    }
    result.kept = kept && result.allowed;
    return result;
  }

  // dq(i) = scale sum over j of ds k(j); the kernel for all pairs wrote 0 there.
  __device__ void differentiate_query(const PlainHead<T>& head, std::int64_t h, std::int64_t i) const {
    const KeyRange keys = head.range(i);
    T* target = const_cast<T*>(head.query_row(args_.query_gradient, i));
#pragma unroll 1
    for (std::int64_t first = 0; first < args_.head_dim; first += 32 * each) {
      double sums[each] = {};
#pragma unroll 1
      for (std::int64_t j = keys.begin; j < keys.end; j += 32) {
        const Coefficients own = j + lane_ < keys.end ? coefficients(head, h, i, j + lane_) : Coefficients{};
        add_plain_rows<T>(
            own.allowed, own.score_gradient, args_.key.feature, first, args_.head_dim, lane_,
            [&](int t) { return head.key_row(args_.key, j + t); }, sums);
      }
      for_features(first, args_.head_dim, [&](std::int64_t d, int x) {
        target[d * args_.query_gradient.feature] = element<T>(sums[x] * args_.scale);
      });
    }
  }

  // dk(j) += scale sum over i of ds q(i)      dv(j) += sum over i of p grad_out(i)
  __device__ void differentiate_key(std::int64_t j) const {
    const std::int64_t width = larger(args_.head_dim, args_.value_dim);
#pragma unroll 1
    for (std::int64_t first = 0; first < width; first += 32 * each) {
      double key_sums[each] = {}, value_sums[each] = {};
#pragma unroll 1
      for (std::int64_t h = g_ * args_.group; h < (g_ + 1) * args_.group; ++h) {
        add_head(h, j, first, key_sums, value_sums);
      }
      add_to(args_.key_gradient, j, first, args_.head_dim, args_.scale, key_sums);
      add_to(args_.value_gradient, j, first, args_.value_dim, 1.0, value_sums);
    }
  }

  __device__ void add_head(std::int64_t h, std::int64_t j, std::int64_t first, double (&key_sums)[each],
                           double (&value_sums)[each]) const {
    const PlainHead<T> head(args_, b_, h);
    const std::int64_t real = head.sequence().real_queries;
#pragma unroll 1
    for (std::int64_t tile = 0; tile < args_.coarse.tiles; ++tile) {
      if (args_.coarse.found[(b_ * args_.heads + h) * args_.coarse.tiles + tile] == 0) {
        continue;
      }
      const std::int64_t begin = tile * args_.coarse.tile_rows, end = smaller(begin + args_.coarse.tile_rows, real);
#pragma unroll 1
      for (std::int64_t i = begin; i < end; i += 32) {
        Coefficients own;
        if (i + lane_ < end && is_coarse(args_.coarse, lse_of(head, h, i + lane_))) {
          const KeyRange keys = head.range(i + lane_);
          if (j >= keys.begin && j < keys.end) {
            own = coefficients(head, h, i + lane_, j);
          }
        }
        add_plain_rows<T>(
            own.allowed, own.score_gradient, args_.query.feature, first, args_.head_dim, lane_,
            [&](int t) { return head.query_row(args_.query, i + t); }, key_sums);
        add_plain_rows<T>(
            own.kept, own.weight, args_.grad_out.feature, first, args_.value_dim, lane_,
            [&](int t) { return head.query_row(args_.grad_out, i + t); }, value_sums);
      }
    }
  }

  __device__ void add_to(const Rows& gradient, std::int64_t j, std::int64_t first, std::int64_t width, double scale,
                         const double (&sums)[each]) const {
    if (gradient.data == nullptr) {
      return;
    }
    T* target = head_of<T>(gradient, b_, g_) + (sequence_of(args_, b_).key_begin + j) * gradient.row;
    for_features(first, width, [&](std::int64_t d, int x) {
      T& one = target[d * gradient.feature];
      one = element<T>(number<double>(one) + sums[x] * scale);
    });
  }

  // visit(d, x) for the features of this lane's sums.
  template <class Visit>
  __device__ void for_features(std::int64_t first, std::int64_t width, const Visit& visit) const {
#pragma unroll
    for (int x = 0; x < each; ++x) {
      const std::int64_t d = first + lane_ + 32 * x;
      if (d < width) {
        visit(d, x);
      }
    }
  }

  const std::int64_t g_;
};

// Whether kv heads [first, last], of all batch items, have such a row: their flags lie one after another.
__device__ bool any_found(const CoarseGradientArguments& args, std::int64_t first, std::int64_t last) {
  const std::int64_t flags = args.group * args.coarse.tiles;
  bool any = false;
  for (std::int64_t n = first * flags + threadIdx.x; n < (last + 1) * flags; n += coarse_threads) {
    any |= args.coarse.found[n] != 0;
  }
  return __syncthreads_or(any) != 0;
}

// A task is a slice of a kv head's keys; a block has neighbouring ones. Nearly always it ends with its first look.
template <class T>
__global__ void __launch_bounds__(coarse_threads)
    coarse_gradients(const __grid_constant__ CoarseGradientArguments args, std::int64_t slices, std::int64_t tasks) {
  ptx::wait_for_kernel_before();
  const std::int64_t each = (tasks + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each;
  const std::int64_t end = smaller(begin + each, tasks);
  if (begin >= end || !any_found(args, begin / slices, (end - 1) / slices)) {
    return;
  }
  for (std::int64_t task = begin; task < end; ++task) {
    const std::int64_t head = task / slices;
    if (any_found(args, head, head)) {
      CoarseGradients<T>(args, head / args.kv_heads, head % args.kv_heads).run(task % slices, slices);
    }
    __syncthreads();  // what the next task writes has been read
  }
}

template <class T>
cudaError_t launch(const CoarseGradientArguments& arguments, int multiprocessors, cudaStream_t stream) {
  const std::int64_t heads = arguments.batch * arguments.kv_heads;
  const std::int64_t most = 8, resident = 2 * std::int64_t{multiprocessors}, some = resident / heads;
  const std::int64_t slices = some < 1 ? 1 : some < most ? some : most;
  cudaLaunchConfig_t config{};
  config.gridDim = grid(std::min(heads * slices, resident));
  config.blockDim = dim3(coarse_threads);
  config.stream = stream;
  cudaLaunchAttribute early = early_start();
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, coarse_gradients<T>, arguments, slices, heads * slices);
}

}  // namespace

cudaError_t launch_coarse_gradients(const CoarseGradientArguments& arguments, DType dtype, int multiprocessors,
                                    cudaStream_t stream) {
  return with_element(dtype,
                      [&](auto element) { return launch<decltype(element)>(arguments, multiprocessors, stream); });
}

}  // namespace headway::cuda
