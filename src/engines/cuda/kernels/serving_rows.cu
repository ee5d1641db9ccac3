// RoPE and appends. Cosines and sines are found once for a position, into a table that stays in L2; rows are read and
// written once, which bounds both kernels.
#include <cfloat>

#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/serving_kernels.h"

namespace headway::cuda {
namespace {

constexpr int threads = 256;

template <class Number>
__global__ void __launch_bounds__(threads) turns(const __grid_constant__ TurnArguments args) {
  const std::int64_t tasks = args.batch * args.rows * args.pairs, step = std::int64_t{gridDim.x} * threads;
  for (std::int64_t task = std::int64_t{blockIdx.x} * threads + threadIdx.x; task < tasks; task += step) {
    const std::int64_t at = task / args.pairs, pair = task % args.pairs;
    const std::int64_t place = at / args.rows * args.positions.batch + at % args.rows * args.positions.row;
    const std::int64_t position = args.positions.wide ? static_cast<const std::int64_t*>(args.positions.data)[place]
                                                      : static_cast<const std::int32_t*>(args.positions.data)[place];
    double sine, cosine;
    sincos(static_cast<double>(position) * args.frequencies[pair], &sine, &cosine);
    auto* turn = static_cast<Number*>(args.table) + at * 2 * args.pairs;
    turn[pair] = static_cast<Number>(cosine * args.factor);
    turn[args.pairs + pair] = static_cast<Number>((args.back ? -sine : sine) * args.factor);
  }
}

// Where the two numbers of a pair lie in a row.
struct PairPlace {
  std::int64_t first, second;
};

__device__ inline PairPlace place_of(std::int64_t pair, std::int64_t pairs, bool interleaved) {
  return interleaved ? PairPlace{2 * pair, 2 * pair + 1} : PairPlace{pair, pair + pairs};
}

template <class T>
__global__ void __launch_bounds__(threads) rotate(const __grid_constant__ RotateArguments args) {
  using Number = RealOf<T>;
  // A task is a pair of a row, or one of the numbers that stay.
  const std::int64_t units = args.width - args.pairs, step = std::int64_t{gridDim.x} * threads;
  const std::int64_t tasks = args.batch * args.heads * args.rows * units;
  for (std::int64_t task = std::int64_t{blockIdx.x} * threads + threadIdx.x; task < tasks; task += step) {
    const std::int64_t unit = task % units, row = task / units % args.rows;
    std::int64_t left = task / units / args.rows;
    const std::int64_t b = left / args.heads;
    left %= args.heads;
    const T* x = static_cast<const T*>(args.x) + b * args.x_batch + row * args.x_row;
    T* out = static_cast<T*>(args.out) + b * args.out_batch + row * args.out_row;
    for (int axis = args.axes - 1; axis >= 0; --axis) {
      const std::int64_t index = left % args.sizes[axis];
      left /= args.sizes[axis];
      x += index * args.x_steps[axis];
      out += index * args.out_steps[axis];
    }
    if (unit >= args.pairs) {
      const std::int64_t d = unit + args.pairs;
      out[d * args.out_feature] = x[d * args.x_feature];
      continue;
    }
    const Number* turn = static_cast<const Number*>(args.table) + (b * args.rows + row) * 2 * args.pairs;
    const Number cosine = turn[unit], sine = turn[args.pairs + unit];
    const PairPlace at = place_of(unit, args.pairs, args.interleaved);
    const Number first = number<Number>(x[at.first * args.x_feature]);
    const Number second = number<Number>(x[at.second * args.x_feature]);
    out[at.first * args.out_feature] = element<T>(first * cosine - second * sine);
    out[at.second * args.out_feature] = element<T>(second * cosine + first * sine);
  }
}

// ---- Appends ----

// One row of a call on its way into a page: its numbers, rotated.
template <class T>
class AppendedRow {
 public:
  using Number = RealOf<T>;

  __device__ AppendedRow(const AppendArguments& args, std::int64_t token, std::int64_t head)
      : args_(args),
        row_(static_cast<const T*>(args.rows) + token / args.each * args.batch_step +
             token % args.each * args.row_step + head * args.head_step),
        turn_(static_cast<const Number*>(args.table) + token * 2 * args.pairs) {}

  __device__ Number at(std::int64_t d) const {
    if (d >= 2 * args_.pairs) {
      return load(d);
    }
    const bool first = args_.interleaved ? d % 2 == 0 : d < args_.pairs;
    const std::int64_t pair = args_.interleaved ? d / 2 : first ? d : d - args_.pairs;
    const PairPlace place = place_of(pair, args_.pairs, args_.interleaved);
    const Number x = load(place.first), y = load(place.second);
    const Number cosine = turn_[pair], sine = turn_[args_.pairs + pair];
    return first ? x * cosine - y * sine : y * cosine + x * sine;
  }

 private:
  __device__ Number load(std::int64_t d) const { return number<Number>(row_[d * args_.feature_step]); }

  const AppendArguments& args_;
  const T* row_;
  const Number* turn_;
};

// The nearest 8-bit number to one of at most 127, or 448.
__device__ inline std::int8_t nearest(float value, std::int8_t) {
  return static_cast<std::int8_t>(__float2int_rn(fminf(fmaxf(value, -127.0f), 127.0f)));
}

__device__ inline float8_e4m3 nearest(float value, float8_e4m3) {
  const float size = fminf(fabsf(value), 448.0f);
  std::uint32_t bits;
  if (size < 0.015625f) {  // 2^-6: below it steps are 2^-9
    bits = static_cast<std::uint32_t>(__float2int_rn(size * 512.0f));
  } else {
    const std::uint32_t whole = __float_as_uint(size);
    bits = ((whole + 0x7FFFFu + (whole >> 20 & 1u)) >> 20) - (120u << 3);
  }
  float8_e4m3 result;
  result.bits = static_cast<std::uint8_t>(bits | (__float_as_uint(value) >> 31 << 7));
  return result;
}

template <class Stored>
inline constexpr float top_of = std::is_same_v<Stored, std::int8_t> ? 127.0f : 448.0f;

// A warp for each row and head. The rows are read twice where they are quantised, the second time from L1.
template <class T, class Stored>
__global__ void __launch_bounds__(threads) append(const __grid_constant__ AppendArguments args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t tasks = args.tokens * args.heads, step = std::int64_t{gridDim.x} * (threads / 32);
  for (std::int64_t task = std::int64_t{blockIdx.x} * (threads / 32) + threadIdx.x / 32; task < tasks; task += step) {
    const std::int64_t token = task / args.heads, head = task % args.heads;
    const AppendedRow<T> row(args, token, head);
    const std::int64_t place = args.slots[token] * args.heads + head;
    auto* out = static_cast<Stored*>(args.pages) + place * args.width;
    if constexpr (std::is_same_v<T, Stored>) {
      for (std::int64_t d = lane; d < args.width; d += 32) {
        out[d] = element<T>(row.at(d));
      }
    } else {
      float largest = 0;
      bool finite = true;
      for (std::int64_t d = lane; d < args.width; d += 32) {
        const float size = fabsf(row.at(d));
        finite = finite && size <= FLT_MAX;
        largest = fmaxf(largest, size);
      }
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      }
      finite = __all_sync(~0u, finite) != 0;
      const float scale = fmaxf(largest / top_of<Stored>, FLT_MIN);
      if (lane == 0) {
        args.scales[place] = finite ? scale : __uint_as_float(0x7FC00000u);
      }
      for (std::int64_t d = lane; d < args.width; d += 32) {
        out[d] = finite ? nearest(row.at(d) / scale, Stored{}) : Stored{};
      }
    }
  }
}

template <class T>
cudaError_t launch_append_of(const AppendArguments& arguments, DType stored, dim3 count, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    if (stored == DType::i8) {
      return start(append<T, std::int8_t>, count, threads, stream, arguments);
    }
    if (stored == DType::f8e4m3) {
      return start(append<T, float8_e4m3>, count, threads, stream, arguments);
    }
  }
  return start(append<T, T>, count, threads, stream, arguments);
}

}  // namespace

cudaError_t launch_turns(const TurnArguments& arguments, cudaStream_t stream) {
  const dim3 count = grid(blocks(arguments.batch * arguments.rows * arguments.pairs, threads));
  return arguments.in_f64 ? start(turns<double>, count, threads, stream, arguments)
                          : start(turns<float>, count, threads, stream, arguments);
}

cudaError_t launch_rotate(const RotateArguments& arguments, DType dtype, cudaStream_t stream) {
  const std::int64_t units = arguments.width - arguments.pairs;
  const dim3 count = grid(blocks(arguments.batch * arguments.heads * arguments.rows * units, threads));
  switch (dtype) {
    case DType::f64: return start(rotate<double>, count, threads, stream, arguments);
    case DType::bf16: return start(rotate<bfloat16>, count, threads, stream, arguments);
    case DType::f16: return start(rotate<float16>, count, threads, stream, arguments);
    default: return start(rotate<float>, count, threads, stream, arguments);
  }
}

cudaError_t launch_append(const AppendArguments& arguments, DType dtype, DType stored, cudaStream_t stream) {
  const dim3 count = grid(blocks(arguments.tokens * arguments.heads, threads / 32));
  switch (dtype) {
    case DType::f64: return launch_append_of<double>(arguments, stored, count, stream);
    case DType::bf16: return launch_append_of<bfloat16>(arguments, stored, count, stream);
    case DType::f16: return launch_append_of<float16>(arguments, stored, count, stream);
    default: return launch_append_of<float>(arguments, stored, count, stream);
  }
}

}  // namespace headway::cuda
