// The forward in plain arithmetic for all rows: for scales so far from 1 that products overflow, or vanish, on the way
// to ordinary scores, whatever the inputs.
#include <algorithm>
#include <cmath>

#include "engines/cuda/kernels/forward_kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/plain_again.cuh"

namespace headway::cuda {
namespace {

constexpr int plain_threads = 128, plain_warps = plain_threads / 32;

template <class T, class Stored>
__global__ void __launch_bounds__(plain_threads)
    plain_forward(const __grid_constant__ ForwardArguments args, std::int64_t row_tiles, std::int64_t power) {
  const std::int64_t tasks = args.batch * args.heads * row_tiles;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t head = task / row_tiles, b = head / args.heads;
    const std::int64_t i = task % row_tiles * plain_warps + threadIdx.x / 32;
    if (i < sequence_of(args, b).query_count) {
      attend_plainly<T, Stored>(args, b, head % args.heads, i, 0, args.value_dim, static_cast<int>(power));
    }
  }
}

template <class T>
const void* kernel(DType stored) {
  switch (stored) {
    case DType::i8: return reinterpret_cast<const void*>(plain_forward<T, std::int8_t>);
    case DType::f8e4m3: return reinterpret_cast<const void*>(plain_forward<T, float8_e4m3>);
    default: return reinterpret_cast<const void*>(plain_forward<T, T>);
  }
}

// A power of two of at most 1 for queries, so that products overflow only if scores do; or half of a large scale, so
// that products of small numbers do not vanish before it. With a scale of 0 products are 0 too.
int query_exponent(double scale, DType dtype) {
  const int limit = dtype == DType::f64 ? 1022 : 126;  // of normal numbers
  int exponent = 0;
  std::frexp(scale, &exponent);
  const int taken = exponent > 1 ? exponent / 2 : exponent - 1;
  return scale == 0 ? -4 * limit : std::clamp(taken, -2 * limit, limit);
}

}  // namespace

cudaError_t launch_plain_forward(const Launch& launch, const ForwardArguments& arguments, DType dtype,
                                 cudaStream_t stream) {
  const int power = query_exponent(arguments.scale, dtype);
  ForwardArguments rest = arguments;
  rest.scale = arguments.scale == 0 ? 0 : std::ldexp(arguments.scale, -power);
  Launch with_power = launch;
  with_power.spans = power;
  return launch_forward(with_power, rest, stream);
}

Launch plain_forward_launch(const ForwardArguments& arguments, DType dtype, DType stored) {
  Launch launch;
  launch.name = "plain rows, for extreme scales";
  launch.kernel = dtype == DType::f64    ? reinterpret_cast<const void*>(plain_forward<double, double>)
                  : dtype == DType::bf16 ? kernel<bfloat16>(stored)
                  : dtype == DType::f16  ? kernel<float16>(stored)
                                         : kernel<float>(stored);
  launch.threads = plain_threads;
  launch.query_block = plain_warps;
  launch.key_block = 32;
  launch.row_tiles = blocks(arguments.query_len, plain_warps);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles;
  return launch;
}

}  // namespace headway::cuda
