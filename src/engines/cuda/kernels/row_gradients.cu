// What a backward needs or gives one number of for each row or head: delta, and the gradient of sinks.
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/plain_rows.cuh"

namespace headway::cuda {
namespace {

constexpr int warp = 32;
constexpr int rows_a_block = delta_rows_a_tile;

// Whether a row has no key to see, for all lanes of a warp. Under a mask or bias its lse is the sink's then, or -inf;
// or the sink has all weight beside keys, or is NaN.
template <class T>
__device__ bool is_keyless(const Arguments& args, const Sequence& sequence, std::int64_t b, std::int64_t h,
                           std::int64_t i, RealOf<T> lse, int lane) {
  const KeyRange keys = row_keys(args, sequence, b, h, i);
  const bool may_be_forbidden = args.mask.data != nullptr || args.bias.data != nullptr;
  if (keys.begin >= keys.end || !may_be_forbidden) {
    return keys.begin >= keys.end;
  }
  const bool says_little = lse == sink_of<RealOf<T>>(args, h) || lse != lse;
  return says_little && !PlainHead<T>(args, b, h).sees_a_key(i, lane);
}

// 0, or NaN where a number of the row is not finite, for all lanes of a warp.
template <class T>
__device__ RealOf<T> warp_poison(const T* row, std::int64_t feature, std::int64_t width, int lane) {
  using Real = RealOf<T>;
  bool finite = true;
  for (std::int64_t d = lane; d < width; d += warp) {
    finite &= number<Real>(row[d * feature]) * Real(0) == Real(0);
  }
  return __all_sync(~0u, finite) != 0 ? Real(0) : infinity<Real>() - infinity<Real>();
}

// delta(i) = <grad_out(i), out(i)>, a warp for each row; both are read once. Where out is 0 the term is 0 whatever
// grad_out holds: a row without keys has no gradient, not even NaN. With sinks, whose gradient has nothing but delta,
// what is not finite in another row's grad_out or lse shows there. Coarse rows are found on the way.
template <class T>
__global__ void __launch_bounds__(warp* rows_a_block)
    row_deltas(const __grid_constant__ DeltaArguments args, std::int64_t row_tiles, std::int64_t tasks) {
  using Real = RealOf<T>;
  const int lane = static_cast<int>(threadIdx.x) % warp;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t i = task % row_tiles * rows_a_block + threadIdx.x / warp, head = task / row_tiles;
    const std::int64_t b = head / args.heads, h = head % args.heads;
    const Sequence sequence = sequence_of(args, b);
    bool coarse = false;
    if (i < sequence.real_queries) {
      const std::int64_t row = sequence.query_begin + i;
      const T* grad = head_of<T>(args.grad_out, b, h) + row * args.grad_out.row;
      const T* out = head_of<T>(args.out, b, h) + row * args.out.row;
      Real sum = warp_delta<T>(grad, args.grad_out.feature, out, args.out.feature, args.value_dim, lane);
      const Real lse = head_of<Real>(args.lse, b, h)[row * args.lse.row];
      if (args.sinks.data != nullptr) {
        const Real poison =
            warp_poison(grad, args.grad_out.feature, args.value_dim, lane) + (lse == lse ? Real(0) : lse);
        sum = is_keyless<T>(args, sequence, b, h, i, lse, lane) ? Real(0) : sum + poison;
      }
      coarse = is_coarse(args.coarse, lse);
      if (lane == 0) {
        head_of<Real>(args.delta, b, h)[row * args.delta.row] = sum;
        if (args.fine_lse.data != nullptr) {
          head_of<Real>(args.fine_lse, b, h)[row * args.fine_lse.row] = coarse ? infinity<Real>() : lse;
        }
      }
    }
    const int found = __syncthreads_or(coarse);
    if (threadIdx.x == 0 && args.coarse.found != nullptr) {
      args.coarse.found[task] = found;
    }
  }
}

// dsink(h) = - sum over rows of exp(sink - lse) delta: a block for each head; every thread adds up its share of the
// rows, then the shares are added in a fixed tree. Rows without keys have a delta of 0 and no part in it, whatever
// their lse is.
constexpr int sink_threads = 256;

template <class T>
__global__ void __launch_bounds__(sink_threads) sink_gradients(const __grid_constant__ SinkGradientArguments args) {
  using Real = RealOf<T>;
  __shared__ double shares[sink_threads];
  for (std::int64_t h = blockIdx.x; h < args.heads; h += gridDim.x) {
    const Real sink = sink_of<Real>(args, h);
    double sum = 0;
    for (std::int64_t b = 0; b < args.batch; ++b) {
      const Sequence sequence = sequence_of(args, b);
      for (std::int64_t i = threadIdx.x; i < sequence.real_queries; i += sink_threads) {
        const std::int64_t row = sequence.query_begin + i;
        const Real lse = head_of<Real>(args.lse, b, h)[row * args.lse.row];
        const Real delta = head_of<Real>(args.delta, b, h)[row * args.delta.row];
        if (delta == 0) {
          continue;
        }
        const WeightBase<Real> weight = weight_base<Summing::in_chains>(args.coarse, b, h, row, lse);
        // At most 1, also where lse is rounded; an infinite sink has all weight.
        const Real exponent = sink - weight.base;
        const Real share = sink == infinity<Real>() ? Real(1) : exponential(exponent > 0 ? Real(0) : exponent);
        sum -= static_cast<double>(share * weight.factor * delta);
      }
    }
    shares[threadIdx.x] = sum;
    for (int half = sink_threads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < half) {
        shares[threadIdx.x] += shares[threadIdx.x + half];
      }
    }
    if (threadIdx.x == 0) {
      store_number(args.gradient.data, args.gradient.dtype, h * args.gradient.stride, shares[0]);
    }
    __syncthreads();
  }
}

template <class Action>
cudaError_t with_type(DType dtype, const Action& action) {
  switch (dtype) {
    case DType::f64: return action(double{});
    case DType::bf16: return action(bfloat16{});
    case DType::f16: return action(float16{});
    default: return action(float{});
  }
}

}  // namespace

cudaError_t launch_row_deltas(const DeltaArguments& arguments, DType dtype, cudaStream_t stream) {
  const std::int64_t row_tiles = blocks(arguments.query_len, rows_a_block);
  const std::int64_t tasks = arguments.batch * arguments.heads * row_tiles;
  return with_type(dtype, [&](auto type) {
    return start(row_deltas<decltype(type)>, grid(tasks), warp * rows_a_block, stream, arguments, row_tiles, tasks);
  });
}

cudaError_t launch_sink_gradients(const SinkGradientArguments& arguments, DType dtype, cudaStream_t stream) {
  return with_type(dtype, [&](auto type) {
    return start(sink_gradients<decltype(type)>, grid(arguments.heads), sink_threads, stream, arguments);
  });
}

}  // namespace headway::cuda
