// The mean of the weights over the heads (mean_weights.cuh) where a head's lse says too little of a row's weights: a
// large one (plain_rows.cuh), or one of large products that cancel, whose weights do not add up to 1. Such rows are
// found anew, in plain arithmetic. A warp looks through the heads of a row and its means; if one of the block's rows
// needs it, all its warps do them one after another.
#include "engines/cuda/kernels/coarse_rows.cuh"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mean_weights_kernels.h"

namespace headway::cuda {
namespace {

constexpr int together = 256;  // heads whose statistics are in shared memory

// Of a row: nothing, the weights of heads whose lse is coarse, or those of every head.
enum class Need : std::uint8_t { nothing, coarse_heads, every_head };

template <class T>
class CoarseMeanWeights : private CoarseBlock<T, MeanWeightsArguments> {
  using Base = CoarseBlock<T, MeanWeightsArguments>;
  using Base::args_;
  using Base::b_;
  using Base::lane_;
  using Base::lse_of;
  using Base::warp_;
  using typename Base::Real;

 public:
  __device__ CoarseMeanWeights(const MeanWeightsArguments& args, std::int64_t b) : Base(args, b) {}

  // What a row needs. By a warp.
  __device__ Need need_of(std::int64_t i) const {
    if (i >= args_.query_len) {
      return Need::nothing;
    }
    bool coarse = false;
    int heads_with_keys = 0;
    for (std::int64_t h = lane_; h < args_.heads; h += 32) {
      const Real lse = lse_of(h, i);
      coarse |= is_coarse(lse);
      heads_with_keys += lse != -infinity<Real>();
    }
    double sum = 0;
    for (std::int64_t j = lane_; j < args_.key_len; j += 32) {
      sum += number<double>(mean_at(i, j));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
      heads_with_keys += __shfl_xor_sync(~0u, heads_with_keys, lanes);
    }
    // Halves are rounded, and small ones much; a sink takes some of the weight.
    constexpr double tolerance = sizeof(T) == 2 ? 0x1p-4 : 0x1p-6;
    const double excess = sum - static_cast<double>(heads_with_keys) / static_cast<double>(args_.heads);
    const bool doubtful = excess > tolerance || (args_.sinks.data == nullptr && excess < -tolerance);
    return doubtful ? Need::every_head : __any_sync(~0u, coarse) != 0 ? Need::coarse_heads : Need::nothing;
  }

  // By all threads.
  __device__ void run(std::int64_t i, Need need) const {
    for (std::int64_t first_key = 0; first_key < args_.key_len; first_key += coarse_threads) {
      const std::int64_t j = first_key + threadIdx.x;
      Real sum = 0;
      for (std::int64_t first = 0; first < args_.heads; first += together) {
        const std::int64_t last = smaller(first + together, args_.heads);
        if (first_key == 0 || args_.heads > together) {
          find(i, first, last, need);
        }
        for (std::int64_t h = first; h < last && j < args_.key_len; ++h) {
          sum += weight(h, i, j, statistics()[h - first]);
        }
      }
      if (j < args_.key_len) {
        mean_at(i, j) = element<T>(sum / static_cast<Real>(args_.heads));
      }
    }
  }

 private:
  __device__ T& mean_at(std::int64_t i, std::int64_t j) const {
    const Matrix& mean = args_.mean;
    return static_cast<T*>(mean.data)[b_ * mean.batch + i * mean.query + j * mean.key];
  }

  __device__ static WeightBase<Real>* statistics() {
    __shared__ WeightBase<Real> list[together];
    return list;
  }

  // What the weights of heads [first, last) are relative to.
  __device__ void find(std::int64_t i, std::int64_t first, std::int64_t last, Need need) const {
    __syncthreads();  // the ones before have been read
    for (std::int64_t h = first + warp_; h < last; h += coarse_warps) {
      WeightBase<Real> row{lse_of(h, i), 1};
      const bool has_keys = row.base != -infinity<Real>() && row.base == row.base;
      if (has_keys && (need == Need::every_head || is_coarse(row.base))) {
        row = weight_base(PlainHead<T>(args_, b_, h).softmax(i, lane_), sink_of<Real>(args_, h));
      }
      if (lane_ == 0) {
        statistics()[h - first] = row;
      }
    }
    __syncthreads();
  }

  __device__ Real weight(std::int64_t h, std::int64_t i, std::int64_t j, const WeightBase<Real>& row) const {
    const PlainHead<T> head(args_, b_, h);
    const KeyRange keys = head.range(i);
    if (j < keys.begin || j >= keys.end) {
      return 0;
    }
    if (row.base != row.base) {  // the head's row is NaN
      return head.is_allowed(i, j) ? row.base : Real(0);
    }
    Real slope;
    const Real score = head.score(i, j, slope);
    return score == -infinity<Real>() ? Real(0) : exponential(score - row.base) * row.factor;
  }
};

template <class T>
__global__ void __launch_bounds__(coarse_threads)
    coarse_mean_weights(const __grid_constant__ MeanWeightsArguments args, std::int64_t tasks) {
  __shared__ Need needs[coarse_warps];
  const std::int64_t row_tiles = (args.query_len + coarse_warps - 1) / coarse_warps;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const CoarseMeanWeights<T> mean(args, task / row_tiles);
    const std::int64_t first = task % row_tiles * coarse_warps;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const Need own = mean.need_of(first + warp);
    needs[warp] = own;
    if (__syncthreads_or(own != Need::nothing) != 0) {
      for (int row = 0; row < coarse_warps; ++row) {
        if (needs[row] != Need::nothing) {
          mean.run(first + row, needs[row]);
        }
      }
    }
    __syncthreads();  // what is needed has been read
  }
}

template <class T>
cudaError_t launch(const MeanWeightsArguments& arguments, cudaStream_t stream) {
  const std::int64_t tasks = arguments.batch * blocks(arguments.query_len, coarse_warps);
  return start(coarse_mean_weights<T>, grid(tasks), coarse_threads, stream, arguments, tasks);
}

}  // namespace

cudaError_t launch_coarse_mean_weights(const MeanWeightsArguments& arguments, DType dtype, cudaStream_t stream) {
  return with_element(dtype, [&](auto element) { return launch<decltype(element)>(arguments, stream); });
}

}  // namespace headway::cuda
