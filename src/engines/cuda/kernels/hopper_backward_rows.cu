// What runs before and after the Hopper backward, tile by tile of query rows.
#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/hopper_backward_kernels.h"
#include "engines/cuda/kernels/hopper_backward_sequence.cuh"
#include "engines/cuda/kernels/hopper_backward_spans.cuh"
#include "engines/cuda/kernels/hopper_finish.cuh"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/plain_rows.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"

namespace headway::cuda {
namespace {

constexpr int row_threads = 256;

// A query tile of the call.
struct RowTile {
  std::int64_t batch, head;
  int tile;
  Sequence sequence;
  std::int64_t index;  // in the arrays of tiles
};

template <int rows>
__device__ __forceinline__ RowTile row_tile(const HopperBackwardArguments& args, std::int64_t block) {
  // There are at most 2^28 of each.
  const auto longest = static_cast<unsigned>((args.query_len + rows - 1) / rows);
  const auto index = static_cast<unsigned>(block), heads = static_cast<unsigned>(args.heads);
  RowTile result;
  const unsigned head = index / longest;
  result.tile = static_cast<int>(index - head * longest);
  result.batch = head / heads;
  result.head = head % heads;
  result.sequence = sequence_of(args, result.batch);
  result.index =
      args.first_tile(result.batch, result.sequence.query_begin, rows) + result.head * args.tiles_a_head + result.tile;
  return result;
}

// Eight neighbouring features of a row in pairs, those past its width as 0.
struct Features {
  std::uint32_t pairs[4] = {0, 0, 0, 0};

  template <class Half>
  __device__ __forceinline__ void load(const Rows& view, const Half* row, int first, int width) {
    if (view.chunks && first + 8 <= width) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(row + first);
      pairs[0] = loaded.x, pairs[1] = loaded.y, pairs[2] = loaded.z, pairs[3] = loaded.w;
      return;
    }
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      if (first + d < width) {
        pairs[d / 2] |= std::uint32_t{row[(first + d) * view.feature].bits} << (16 * (d % 2));
      }
    }
  }
};

// lse and delta(i) = <dO(i), O(i)> of each row, in tiles that the copy engine can fetch; dO and O are read once. Where
// O is 0 the term is 0. A row of dO that is not finite makes delta NaN: its pairs are NaN, and dO itself may be
// replaced. Coarse rows are left to their own kernel (coarse_gradients.cu).
template <class Half, int head_dim, int rows>
__global__ void __launch_bounds__(row_threads)
    backward_rows(const __grid_constant__ HopperBackwardArguments args, const __grid_constant__ Rows out) {
  constexpr int lanes = head_dim / 8;  // of a row
  ptx::let_next_kernel_start();
  const RowTile at = row_tile<rows>(args, blockIdx.x);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *args.next_item = 0;
    if (args.next_tile != nullptr) {
      *args.next_tile = 0;
    }
  }
  if (at.tile * rows >= at.sequence.query_count) {
    if (threadIdx.x == 0) {
      args.coarse.found[blockIdx.x] = 0;
    }
    return;
  }
  constexpr int apart = row_threads / lanes, each = rows / apart;  // rows of a thread
  const int lane = static_cast<int>(threadIdx.x) % lanes, first_row = static_cast<int>(threadIdx.x) / lanes;
  const auto width = static_cast<int>(args.value_dim);
  const std::int64_t first = std::int64_t{at.tile} * rows;
  // All loads are in flight before the first is used.
  Features grads[each], results[each];
  float lses[each];
#pragma unroll
  for (int n = 0; n < each; ++n) {
    const std::int64_t i = first + first_row + n * apart, position = at.sequence.query_begin + i;
    lses[n] = -INFINITY;
    if (i < at.sequence.real_queries) {
      lses[n] = head_of<float>(args.lse, at.batch, at.head)[position * args.lse.row];
      const Half* grad = head_of<Half>(args.grad_out, at.batch, at.head) + position * args.grad_out.row;
      const Half* result = head_of<Half>(out, at.batch, at.head) + position * out.row;
      grads[n].load(args.grad_out, grad, 8 * lane, width);
      results[n].load(out, result, 8 * lane, width);
    }
  }
  bool poisoned = false, coarse = false;
#pragma unroll
  for (int n = 0; n < each; ++n) {
    const int row = first_row + n * apart;
    float sum = 0.0f, check = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 grad = ptx::unpacked_pair<Half>(grads[n].pairs[k]);
      const float2 result = ptx::unpacked_pair<Half>(results[n].pairs[k]);
      sum += result.x == 0.0f ? 0.0f : grad.x * result.x;
      sum += result.y == 0.0f ? 0.0f : grad.y * result.y;
      check = fmaf(grad.x, 0.0f, fmaf(grad.y, 0.0f, check));
    }
#pragma unroll
    for (int lanes_apart = lanes / 2; lanes_apart > 0; lanes_apart /= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes_apart);
      check += __shfl_xor_sync(~0u, check, lanes_apart);
    }
    if (lane == 0) {
      const float lse = lses[n];
      args.tile_lse[at.index * rows + place_of_row(row)] =
          lse == -INFINITY || is_coarse(lse) ? INFINITY : lse * args.lse_unit;
      args.tile_delta[at.index * rows + place_of_row(row)] = sum + check;
      poisoned |= check != 0.0f;
      coarse |= is_coarse(lse);
    }
  }
  const int any = __syncthreads_or(poisoned), any_coarse = __syncthreads_or(coarse);
  if (threadIdx.x == 0) {
    args.coarse.found[blockIdx.x] = any_coarse;
    args.tile_turns[at.index] = 0;
    args.tile_poisoned[at.index] = any;
  }
}

// Whether spans leave the tile a tile of keys: else nothing was added to its sums.
__device__ __forceinline__ bool sees_any(const HopperBackwardArguments& args, const RowTile& at,
                                         const BackwardSequence& order) {
  const std::int64_t line =
      row_lines(args, at.sequence, at.batch, at.head, std::int64_t{at.tile} * order.query_rows(), order.query_rows())
          .first;
  return !SpanWalk::is_empty(args.spans, line, order.keys_of(at.tile));
}

// dQ: f32 sums in the order of the threads that made them (HopperBackwardConsumer::store_query_gradients) become rows.
// Sums are read once and rows written once.
template <class Half, int head_dim, int rows>
__device__ __forceinline__ void finish_queries(const HopperBackwardArguments& args, const RowTile& at,
                                               const BackwardSequence& order) {
  constexpr HopperBackwardTile tile{head_dim, rows};
  constexpr int chunks = tile.gradient_numbers() / 1024;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, quad_lane = threadIdx.x % 4;
  const float scale = static_cast<float>(args.scale);
  const bool empty = at.tile >= order.query_tiles() || order.keys_of(at.tile).count() == 0 ||
                     (args.spans.given && !sees_any(args, at, order));
  const auto* sums =
      reinterpret_cast<const float4*>(args.tile_sums + at.index * tile.gradient_numbers()) + group * chunks * 128;
#pragma unroll
  for (int c = 0; c < chunks; c += 4) {
    float4 loaded[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      loaded[k] = empty ? float4{0, 0, 0, 0} : __ldcs(sums + (c + k) * 128 + thread);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float low = r == 0 ? loaded[k].x : loaded[k].z, high = r == 0 ? loaded[k].y : loaded[k].w;
        words[k] = ptx::packed_pair<Half>(low * scale, high * scale);
      }
      transpose_quad(words, quad_lane);
      const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * r + (tile.split_by_columns() ? 0 : group * 64);
      const int column = (tile.split_by_columns() ? group * tile.split_columns() : 0) + c * 8 + quad_lane * 8;
      const std::int64_t i = std::int64_t{at.tile} * rows + row;
      if (i < at.sequence.query_count && column < args.head_dim) {
        Half* to = head_of<Half>(args.query_gradient, at.batch, at.head) +
                   (at.sequence.query_begin + i) * args.query_gradient.row + column;
        const bool real = i < at.sequence.real_queries;
        *reinterpret_cast<uint4*>(to) =
            real ? make_uint4(words[0], words[1], words[2], words[3]) : make_uint4(0, 0, 0, 0);
      }
    }
  }
}

__device__ __forceinline__ bool is_allowed(const HopperBackwardArguments& args, const RowTile& at, std::int64_t i,
                                           std::int64_t key) {
  const KeyRange range = row_range(args, at.sequence, at.batch, i);
  if (key < range.begin || key >= range.end) {
    return false;
  }
  if (args.spans.given && !spans_of_row(args, at.sequence, at.batch, at.head, i).allows(key)) {
    return false;
  }
  const auto offset = [&](const Matrix& matrix) {
    return at.batch * matrix.batch + at.head * matrix.head + i * matrix.query + key * matrix.key;
  };
  if (args.mask.data != nullptr && static_cast<const std::uint8_t*>(args.mask.data)[offset(args.mask)] == 0) {
    return false;
  }
  return args.bias.data == nullptr ||
         load_number<float>(args.bias.data, args.bias.dtype, offset(args.bias)) != -INFINITY;
}

// The features of a tile of dO in which some row is not finite, in any order; returns how many.
template <class Half, int rows>
__device__ __forceinline__ int poisoned_features(const HopperBackwardArguments& args, const Half* grads, int first,
                                                 int last, int (&features)[256]) {
  __shared__ int count;
  if (threadIdx.x == 0) {
    count = 0;
  }
  __syncthreads();
  const auto d = static_cast<int>(threadIdx.x);
  static_assert(row_threads == 256);
  bool poisoned = false;
  for (int i = first; i < last && d < args.value_dim; ++i) {
    poisoned |= !isfinite(number<float>(grads[i * args.grad_out.row + d * args.grad_out.feature]));
  }
  if (poisoned) {
    features[atomicAdd(&count, 1)] = d;
  }
  __syncthreads();
  return count;
}

// What is not finite in a tile of dO reaches dV of every key that one of its rows sees: the guard may have taken it
// out. Sums of such numbers have the same bits in any order. Rare, and so plain: a thread for each key and feature.
template <class Half, int rows>
__device__ __forceinline__ void add_poison(const HopperBackwardArguments& args, const RowTile& at,
                                           const BackwardSequence& order) {
  const TileSpan tiles = order.keys_of(at.tile);
  const std::int64_t first_key = std::int64_t{tiles.begin} * backward_keys;
  const std::int64_t keys = smaller(std::int64_t{tiles.end} * backward_keys, order.valid_keys) - first_key;
  const int first_row = at.tile * rows, last_row = min(first_row + rows, order.real_queries);
  const Half* grads = head_of<Half>(args.grad_out, at.batch, at.head) + at.sequence.query_begin * args.grad_out.row;
  Half* target = head_of<Half>(args.value_gradient, at.batch, at.head / args.group) +
                 at.sequence.key_begin * args.value_gradient.row;
  __shared__ int features[256];
  const int width = poisoned_features<Half, rows>(args, grads, first_row, last_row, features);
  for (std::int64_t x = threadIdx.x; x < keys * width; x += row_threads) {
    const std::int64_t key = first_key + x / width;
    const int d = features[x % width];
    float sum = 0.0f;
    for (int i = first_row; i < last_row && sum == sum; ++i) {
      const float value = number<float>(grads[i * args.grad_out.row + d * args.grad_out.feature]);
      if (!isfinite(value) && is_allowed(args, at, i, key)) {
        sum += value;
      }
    }
    if (sum != 0.0f) {
      // Other tiles may add to the same element: NaN wins over an infinity, and opposite infinities are NaN.
      auto* word = reinterpret_cast<unsigned*>(
          reinterpret_cast<std::uintptr_t>(target + key * args.value_gradient.row + d) & ~std::uintptr_t{3});
      const int shift = reinterpret_cast<std::uintptr_t>(target + key * args.value_gradient.row + d) % 4 != 0 ? 16 : 0;
      unsigned before = *word, found;
      do {
        found = before;
        Half old;
        old.bits = static_cast<std::uint16_t>(found >> shift);
        const Half next = element<Half>(number<float>(old) + sum);
        before = atomicCAS(word, found, (found & ~(0xFFFFu << shift)) | std::uint32_t{next.bits} << shift);
      } while (before != found);
    }
  }
}

template <class Half, int head_dim, int rows>
__global__ void __launch_bounds__(row_threads, 5)
    backward_finish(const __grid_constant__ HopperBackwardArguments args) {
  ptx::wait_for_kernel_before();
  const RowTile at = row_tile<rows>(args, blockIdx.x);
  if (at.tile * rows >= at.sequence.query_count) {
    return;
  }
  constexpr HopperBackwardTile tile{head_dim, rows};
  const BackwardSequence order = sequence_order(args, at.sequence, at.batch, tile.row_bits(), tile.key_bits());
  if constexpr (head_dim <= 128) {
    if (args.query_gradient.data != nullptr && !args.whole_query_gradients) {
      finish_queries<Half, head_dim, rows>(args, at, order);
    }
  }
  if (args.value_gradient.data != nullptr && args.tile_poisoned[at.index] != 0) {
    add_poison<Half, rows>(args, at, order);
  }
}

template <class Action>
cudaError_t with_tile(DType dtype, HopperBackwardTile tile, const Action& action) {
  const auto of_type = [&](auto type) {
    if (tile.head_dim == 256) {
      return action(type, std::integral_constant<int, 256>{}, std::integral_constant<int, 64>{});
    }
    if (tile.head_dim == 128) {
      return action(type, std::integral_constant<int, 128>{}, std::integral_constant<int, 64>{});
    }
    return tile.queries == 128 ? action(type, std::integral_constant<int, 64>{}, std::integral_constant<int, 128>{})
                               : action(type, std::integral_constant<int, 64>{}, std::integral_constant<int, 64>{});
  };
  return dtype == DType::bf16 ? of_type(bfloat16{}) : of_type(float16{});
}

std::int64_t row_tiles(const HopperBackwardArguments& arguments, HopperBackwardTile tile) {
  return arguments.batch * arguments.heads * blocks(arguments.query_len, tile.queries);
}

}  // namespace

cudaError_t launch_backward_rows(const HopperBackwardArguments& arguments, const Rows& out, DType dtype,
                                 HopperBackwardTile tile, cudaStream_t stream) {
  return with_tile(dtype, tile, [&](auto type, auto head_dim, auto rows) {
    return start(backward_rows<decltype(type), head_dim.value, rows.value>, grid(row_tiles(arguments, tile)),
                 row_threads, stream, arguments, out);
  });
}

cudaError_t launch_backward_finish(const HopperBackwardArguments& arguments, DType dtype, HopperBackwardTile tile,
                                   cudaStream_t stream) {
  return with_tile(dtype, tile, [&](auto type, auto head_dim, auto rows) {
    cudaLaunchAttribute early = early_start();
    cudaLaunchConfig_t config{};
    config.gridDim = grid(row_tiles(arguments, tile));
    config.blockDim = dim3(row_threads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, backward_finish<decltype(type), head_dim.value, rows.value>, arguments);
  });
}

}  // namespace headway::cuda
