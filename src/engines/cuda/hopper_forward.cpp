#include "engines/cuda/hopper_forward.h"

#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/hopper_kernels.h"
#include "engines/cuda/tensor_map.h"

namespace headway::cuda {
namespace {

constexpr std::int64_t longest_axis = std::int64_t{1} << 28;  // positions and their sums are 32-bit numbers

bool has_ranges(const Problem& problem) {
  return problem.causal != Causal::none || problem.window_left || problem.window_right || problem.valid_lens ||
         problem.query_lens || problem.packed() || problem.sinks;
}

// Whether the softmax can multiply by the scale: it takes the highest product, and slopes are divided by it.
bool scale_is_ordinary(const Problem& problem) { return problem.scale > 1e-20 && problem.scale < 1e20; }

HopperVariant variant_of(const Problem& problem) {
  if (problem.bias || problem.mask) {
    return HopperVariant::masked;
  }
  if (problem.softcap || problem.alibi_slopes || problem.dropout.active() || !scale_is_ordinary(problem)) {
    return HopperVariant::modified;
  }
  if (has_ranges(problem)) {
    return HopperVariant::ranged;
  }
  constexpr std::int64_t many_keys = 8192;
  return problem.key_len >= many_keys ? HopperVariant::plain_long : HopperVariant::plain;
}

HopperKernel kernel_of(const Problem& problem) {
  const std::int64_t widest = std::max(problem.head_dim, problem.value_dim);
  const HopperVariant variant = variant_of(problem);
  return widest <= 64    ? hopper_kernel_64(problem.dtype(), variant)
         : widest <= 128 ? hopper_kernel_128(problem.dtype(), variant)
                         : hopper_kernel_256(problem.dtype(), variant);
}

std::int64_t query_tiles(const Problem& problem, const HopperTile& tile) {
  return (problem.query_len + tile.rows() - 1) / tile.rows();
}

std::int64_t tiles(const Problem& problem, const HopperTile& tile) {
  return problem.batch * problem.heads * query_tiles(problem, tile);
}

// Heads whose tiles run together. Causal: enough for the long tiles to begin early, not so many that their keys and
// values leave L2 (found by timing). Without, tiles are alike and neighbours should share keys: as many as occupy the
// device.
int head_group(const Problem& problem, const HopperTile& tile) {
  if (problem.causal == Causal::none) {
    const std::int64_t multiprocessors = device_properties(problem.query.device().index).multiprocessors;
    return static_cast<int>(multiprocessors / query_tiles(problem, tile) + 1);
  }
  constexpr std::int64_t cached_bytes = std::int64_t{64} << 20;
  const std::int64_t head_bytes = problem.key_len * (problem.head_dim + problem.value_dim) * 2;
  return static_cast<int>(std::clamp<std::int64_t>(cached_bytes / head_bytes, 8, 32));
}

MapSteps steps_of(const ConstTensorView& view) {
  return {view.size(1) > 1 && view.stride(1) != 0 ? 1 : 0, view.size(0) > 1 && view.stride(0) != 0 ? 1 : 0};
}

// Whether columns 8 k to 8 k + 7 of every row lie side by side and aligned to 8 elements (or to the 16 bytes of one
// access).
bool in_chunks(const std::optional<ConstTensorView>& matrix) {
  constexpr std::int64_t columns = 8;
  if (!matrix || matrix->stride(3) != 1) {
    return false;
  }
  const std::size_t access = std::min<std::size_t>(columns * size_of(matrix->dtype()), 16);
  return reinterpret_cast<std::uintptr_t>(matrix->data()) % access == 0 && matrix->stride(0) % columns == 0 &&
         matrix->stride(1) % columns == 0 && matrix->stride(2) % columns == 0;
}

// cap * tanh(unit * product) = product * (a polynomial in product^2) up to |unit * product| = 1/4. tanh(y) / y there is
// the polynomial below in y^2, to 1e-9.
void place_softcap(double cap, double unit, HopperArguments& arguments) {
  constexpr double factors[] = {0.9999999975, -0.3333320644, 0.1332313281, -0.0513277240};
  constexpr double small = 0.25;
  arguments.cap = static_cast<float>(cap);
  arguments.small_product = static_cast<float>(small / std::abs(unit));
  double power = cap * unit;
  for (int k = 0; k < 4; ++k) {
    arguments.cap_factors[k] = static_cast<float>(factors[k] * power);
    power *= unit * unit;
  }
}

// Where the scale is applied: to products on their way to scores, or by the softmax, which saves a multiplication.
void place_scale(const Problem& problem, HopperArguments& arguments) {
  constexpr double log2_e = 1.4426950408889634;
  const bool by_softmax =
      !problem.softcap && scale_is_ordinary(problem) && variant_of(problem) != HopperVariant::masked;
  const double unit = problem.scale / problem.softcap.value_or(1.0);
  arguments.unit = static_cast<float>(unit);
  arguments.multiply = !by_softmax;
  arguments.softmax_unit = static_cast<float>(by_softmax ? problem.scale * log2_e : log2_e);
  arguments.slope_factor = static_cast<float>(by_softmax ? 1.0 / problem.scale : 1.0);
  if (problem.softcap) {
    place_softcap(*problem.softcap, unit, arguments);
  }
}

HopperArguments arguments_of(const ForwardProblem& problem, const HopperTile& tile, const ForwardArguments& arguments) {
  HopperArguments result{};
  static_cast<ForwardArguments&>(result) = arguments;
  result.query_map = tensor_map(problem.query, tile.rows(), problem.operation);
  result.key_map = tensor_map(problem.key, tile.keys, problem.operation);
  result.value_map = tensor_map(problem.value, tile.keys, problem.operation);
  result.query_steps = steps_of(problem.query);
  result.key_steps = steps_of(problem.key);
  result.value_steps = steps_of(problem.value);
  place_scale(problem, result);
  result.kept = static_cast<float>(problem.dropout.kept_scale);
  result.bias_in_chunks = in_chunks(problem.bias);
  result.mask_in_chunks = in_chunks(problem.mask);
  result.query_tiles = static_cast<int>(query_tiles(problem, tile));
  result.tiles = static_cast<int>(tiles(problem, tile));
  result.head_group = head_group(problem, tile);
  return result;
}

std::optional<std::string> size_refusal(const Problem& problem) {
  constexpr std::int64_t widest = 256;
  if (problem.head_dim < 1 || problem.head_dim > widest || problem.value_dim < 1 || problem.value_dim > widest) {
    return text("head_dim ", problem.head_dim, " and value_dim ", problem.value_dim, ", expected 1 to ", widest);
  }
  if (problem.batch == 0 || problem.heads == 0 || problem.query_len == 0 || problem.key_len == 0) {
    return "a size of 0";
  }
  if (problem.query.size(2) > longest_axis || problem.key.size(2) > longest_axis ||
      problem.batch * problem.heads > longest_axis || tiles(problem, kernel_of(problem).tile) > longest_axis) {
    return text("more than 2^28 positions, heads or tiles");
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> hopper_refusal(const Problem& problem) {
  if (problem.dtype() != DType::bf16 && problem.dtype() != DType::f16) {
    return text("type ", problem.dtype(), ", expected bf16 or f16");
  }
  const DeviceProperties& device = device_properties(problem.query.device().index);
  if (device.major != 9) {
    return text("compute capability ", device.major, ".", device.minor, ", expected 9.0");
  }
  if (problem.bias && problem.bias->dtype() == DType::f64) {
    return "a bias of f64";
  }
  if (auto reason = size_refusal(problem)) {
    return reason;
  }
  if (auto reason = map_refusal("query", problem.query)) {
    return reason;
  }
  if (auto reason = map_refusal("key", problem.key)) {
    return reason;
  }
  return map_refusal("value", problem.value);
}

std::optional<std::string> hopper_refusal(const TensorView& out) {
  if (out.size(3) % 8 != 0) {
    return text("value_dim ", out.size(3), ", expected a multiple of 8");
  }
  return map_refusal("out", out);  // rows are stored in pieces of 16 bytes
}

Launch hopper_launch(const Problem& problem) {
  constexpr const char* names[] = {"hopper_forward", "hopper_forward", "hopper_forward (key ranges)",
                                   "hopper_forward (modified scores)", "hopper_forward (mask or bias)"};
  const HopperKernel kernel = kernel_of(problem);
  Launch launch;
  launch.name = names[static_cast<int>(variant_of(problem))];
  launch.kernel = kernel.function;
  launch.threads = kernel.tile.threads();
  launch.shared_bytes = kernel.shared_bytes;
  launch.query_block = kernel.tile.rows();
  launch.key_block = kernel.tile.keys;
  launch.row_tiles = query_tiles(problem, kernel.tile);
  launch.tasks = tiles(problem, kernel.tile);
  launch.stages = kernel.tile.slots / 2;
  return launch;
}

std::size_t hopper_bytes(const Problem& problem) {
  return is_plain(variant_of(problem)) ? 0 : Workspace::rounded(sizeof(int));
}

cudaError_t queue_hopper(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                         Workspace& workspace) {
  HopperArguments all = arguments_of(problem, kernel_of(problem).tile, arguments);
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  if (!is_plain(variant_of(problem))) {
    all.next_tile = workspace.take_as<int>(1);
    check(cudaMemsetAsync(all.next_tile, 0, sizeof(int), stream), problem.operation, "clearing the tile counter");
  }
  const int blocks = std::min(all.tiles, device_properties(problem.query.device().index).multiprocessors);
  void* parameters[] = {&all};
  return cudaLaunchKernel(launch.kernel, dim3(static_cast<unsigned>(blocks)),
                          dim3(static_cast<unsigned>(launch.threads)), parameters, launch.shared_bytes, stream);
}

}  // namespace headway::cuda
