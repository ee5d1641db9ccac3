#include "engines/cuda/hopper_forward.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/text.h"
#include "engines/cuda/device.h"
#include "engines/cuda/hopper_units.h"
#include "engines/cuda/kernels/decode_kernels.h"
#include "engines/cuda/kernels/hopper_kernels.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/splits.h"
#include "engines/cuda/tensor_map.h"

namespace headway::cuda {
namespace {

bool has_ranges(const Problem& problem) {
  return problem.causal != Causal::none || problem.window_left || problem.window_right || problem.valid_lens ||
         problem.query_lens || problem.lengths_vary() || problem.sinks;
}

// Whether the softmax can multiply by the scale: it takes the highest product, and slopes are divided by it.
bool scale_is_ordinary(const Problem& problem) { return problem.scale > 1e-20 && problem.scale < 1e20; }

// Of a call whose keys are not split.
HopperVariant whole_variant(const Problem& problem) {
  if (problem.dropout.active()) {
    return HopperVariant::dropped;
  }
  if (problem.bias || problem.mask) {
    return HopperVariant::masked;
  }
  if (problem.softcap || problem.alibi_slopes || !scale_is_ordinary(problem)) {
    return HopperVariant::modified;
  }
  if (problem.spans) {
    return HopperVariant::spanned;
  }
  // A pack's sequences have their bits in any pack, and in an invariant batch those of the pack: one shape of tiles.
  constexpr std::int64_t few_keys = 768, many_keys = 8192;
  const bool is_short = problem.key_len <= few_keys && !problem.packed() && !problem.batch_invariant;
  if (has_ranges(problem)) {
    return is_short ? HopperVariant::ranged_short : HopperVariant::ranged;
  }
  if (is_short) {
    return HopperVariant::plain_short;
  }
  return problem.key_len >= many_keys && !problem.batch_invariant ? HopperVariant::plain_long : HopperVariant::plain;
}

// Of the tiles: that of query, key and value alike, in whole panels of 64.
int padded_dim(const Problem& problem) {
  return static_cast<int>((std::max(problem.head_dim, problem.value_dim) + 63) / 64 * 64);
}

std::int64_t query_tiles(const Problem& problem, const HopperTile& tile) {
  return (problem.query_len + tile.rows() - 1) / tile.rows();
}

// Into how many parts the keys of each tile are split where there are too few tiles to occupy the device. A pack's
// sequences have their bits in any pack, and in an invariant batch those of the pack.
std::int64_t splits_of(const Problem& problem) {
  const HopperVariant variant = whole_variant(problem);
  const bool plain = is_plain(variant) || variant == HopperVariant::ranged || variant == HopperVariant::ranged_short;
  if (!plain || problem.packed() || problem.batch_invariant || problem.query_len == 0 || problem.key_len == 0) {
    return 1;
  }
  const HopperTile tile = hopper_tile(padded_dim(problem), HopperVariant::split);
  const std::int64_t blocks = (problem.key_len + tile.keys - 1) / tile.keys;
  const std::int64_t tiles = problem.batch * problem.heads * query_tiles(problem, tile);
  const std::int64_t slots = device_of(problem).multiprocessors;
  if (tiles >= slots) {
    return 1;
  }
  // Fewer blocks than these, or a small gain, would not pay for the merge; two waves are enough to balance.
  constexpr std::int64_t fewest_blocks = 8;
  constexpr double least_gain = 1.3;
  const std::int64_t most = std::min(blocks / fewest_blocks, 2 * slots / std::max<std::int64_t>(tiles, 1));
  const std::int64_t splits = balanced_splits(tiles, blocks, most, slots);
  const auto efficiency = [&](std::int64_t count) { return split_efficiency(tiles, blocks, count, slots); };
  return efficiency(splits) > least_gain * efficiency(1) ? splits : 1;
}

HopperVariant variant_of(const Problem& problem) {
  return splits_of(problem) > 1 ? HopperVariant::split : whole_variant(problem);
}

const char* name_of(HopperVariant variant) {
  switch (variant) {
    case HopperVariant::split: return "hopper_forward (keys split)";
    case HopperVariant::ranged:
    case HopperVariant::ranged_short: return "hopper_forward (key ranges)";
    case HopperVariant::spanned: return "hopper_forward (spans)";
    case HopperVariant::modified: return "hopper_forward (modified scores)";
    case HopperVariant::masked: return "hopper_forward (mask or bias)";
    case HopperVariant::dropped: return "hopper_forward (dropout)";
    default: return "hopper_forward";
  }
}

// Whether all tiles take equally long: there is no need to hand them out as blocks of threads become free. (Windows are
// better handed out.)
bool has_equal_tiles(const Problem& problem) {
  return problem.causal == Causal::none && !problem.window_left && !problem.window_right && !problem.valid_lens &&
         !problem.query_lens && !problem.lengths_vary() && !problem.spans;
}

// Whether a counter hands tiles out: there are more than one for each block of threads.
bool has_counter(const Problem& problem, std::int64_t tiles) {
  return !has_equal_tiles(problem) && tiles > device_of(problem).multiprocessors;
}

HopperKernel kernel_of(const Problem& problem) {
  const HopperVariant variant = variant_of(problem);
  if (variant == HopperVariant::spanned) {
    return hopper_kernel_spans(problem.dtype(), padded_dim(problem));
  }
  switch (padded_dim(problem)) {
    case 64: return hopper_kernel_64(problem.dtype(), variant);
    case 128: return hopper_kernel_128(problem.dtype(), variant);
    case 192: return hopper_kernel_192(problem.dtype(), variant);
    default: return hopper_kernel_256(problem.dtype(), variant);
  }
}

// Of a head: query tiles, for each part of the keys.
std::int64_t head_tiles(const Problem& problem, const HopperTile& tile) {
  return query_tiles(problem, tile) * splits_of(problem);
}

std::int64_t tiles(const Problem& problem, const HopperTile& tile) {
  return problem.batch * problem.heads * head_tiles(problem, tile);
}

SplitShape split_shape(const Problem& problem, const HopperTile& tile) {
  return {problem.batch * problem.heads, splits_of(problem), query_tiles(problem, tile) * tile.rows(),
          problem.value_dim};
}

// Heads whose tiles run together. Causal: enough for the long tiles to begin early, not so many that their keys and
// values leave L2 (found by timing). Without, tiles are alike and neighbours should share keys: as many as occupy the
// device.
int head_group(const Problem& problem, const HopperTile& tile) {
  if (problem.causal == Causal::none && !problem.spans) {
    const std::int64_t multiprocessors = device_of(problem).multiprocessors;
    return static_cast<int>(multiprocessors / head_tiles(problem, tile) + 1);
  }
  constexpr std::int64_t cached_bytes = std::int64_t{64} << 20;
  const std::int64_t head_bytes = problem.key_len * (problem.head_dim + problem.value_dim) * 2;
  return static_cast<int>(std::clamp<std::int64_t>(cached_bytes / head_bytes, 8, 32));
}

constexpr double small_limit = 0.16;

// cap * tanh(unit * product) = product * (a polynomial in product^2) while |unit * product| is at most `limit`.
// `factors` are those of tanh(y) / y in y^2, and become those of the former in product^2. Returns the largest product.
template <std::size_t terms>
float place_polynomial(const double (&factors)[terms], double limit, double cap, double unit, float (&to)[terms]) {
  constexpr double highest_factor = 1e37, highest_product = 1e18;  // whose square is finite
  double power = cap * unit;
  bool finite = true;
  for (std::size_t k = 0; k < terms; ++k) {
    const double factor = factors[k] * power;
    finite = finite && std::abs(factor) < highest_factor;
    to[k] = finite ? static_cast<float>(factor) : 0.0f;
    power *= unit * unit;
  }
  return finite ? static_cast<float>(std::min(limit / std::abs(unit), highest_product)) : 0.0f;
}

// Where the scale is applied: to products on their way to scores, or by the softmax, which saves a multiplication.
void place_scale(const Problem& problem, HopperArguments& arguments) {
  constexpr double log2_e = 1.4426950408889634;
  constexpr double highest_exact = 16777216;  // 2^24: up to here exponents are rounded by half of 1 at most
  const bool by_softmax = !problem.softcap && !problem.bias && scale_is_ordinary(problem);
  // A cap gives scores any unit for nothing; a bias is natural, and a mask's softmax ends in natural units.
  const bool in_log2 = problem.softcap && !is_masked(variant_of(problem));
  const double unit = problem.scale / problem.softcap.value_or(1.0);
  const double natural_scale = by_softmax ? problem.scale : in_log2 ? 1.0 / log2_e : 1.0;
  arguments.unit = static_cast<float>(unit);
  arguments.multiply = !by_softmax;
  arguments.softmax_unit = static_cast<float>(natural_scale * log2_e);
  arguments.coarse_score = static_cast<float>(std::min(highest_exact / (natural_scale * log2_e), 1e38));
  arguments.coarse_slope = arguments.coarse_score / static_cast<float>(problem.query_len + problem.key_len);
  arguments.slope_factor = static_cast<float>(1.0 / natural_scale);
  arguments.natural_scale = static_cast<float>(natural_scale);
  if (problem.softcap) {
    place_softcap(*problem.softcap / natural_scale, unit, arguments);
    arguments.folds_cap = unit > 0 && *problem.softcap / natural_scale < highest_exact;
    constexpr double highest_exponent = 30;  // of weights whose sums with V up to 1e18 do not overflow
    arguments.lowest_reference = static_cast<float>(arguments.cap * small_limit - highest_exponent);
  }
}

HopperArguments arguments_of(const ForwardProblem& problem, const HopperTile& tile, const ForwardArguments& arguments,
                             const std::optional<ConstTensorView>& aligned) {
  HopperArguments result{};
  static_cast<ForwardArguments&>(result) = arguments;
  result.query_map = tensor_map(problem.query, tile.rows(), problem.operation);
  result.box_rows = box_rows(problem, tile.keys);
  result.key_map = tensor_map(problem.key, result.box_rows, problem.operation);
  result.value_map = tensor_map(problem.value, result.box_rows, problem.operation);
  result.query_steps = steps_of(problem.query);
  result.key_steps = steps_of(problem.key);
  result.value_steps = steps_of(problem.value);
  place_scale(problem, result);
  result.kept = static_cast<float>(problem.dropout.kept_scale);
  result.units = units_of(problem, tile, aligned);
  result.query_tiles = static_cast<int>(head_tiles(problem, tile));
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
  if (problem.query.size(2) > longest_axis || problem.key.size(2) > longest_axis || problem.key_len > longest_axis ||
      problem.batch * problem.heads > longest_axis || tiles(problem, kernel_of(problem).tile) > longest_axis) {
    return text("more than 2^28 positions, heads or tiles");
  }
  return std::nullopt;
}

}  // namespace

int box_rows(const Problem& problem, std::int64_t block) {
  return static_cast<int>(problem.pages ? std::gcd(problem.pages->size, block) : block);
}

MapSteps steps_of(const ConstTensorView& view) {
  return {view.size(1) > 1 && view.stride(1) != 0 ? 1 : 0, view.size(0) > 1 && view.stride(0) != 0 ? 1 : 0};
}

void place_softcap(double cap, double unit, HopperArguments& arguments) {
  constexpr double small[] = {0.9999999722, -0.3333137413, 0.1312851963};  // to 3e-8 up to small_limit
  constexpr double medium[] = {0.9999999975,  -0.3333328327, 0.1333168913,
                               -0.0537687123, 0.0207536409,  -0.0058521718};  // to 3e-9 up to 0.6
  arguments.cap = static_cast<float>(cap);
  arguments.small_product = place_polynomial(small, small_limit, cap, unit, arguments.small_factors);
  arguments.medium_product = place_polynomial(medium, 0.6, cap, unit, arguments.medium_factors);
}

std::optional<std::string> kind_refusal(const Problem& problem) {
  if (problem.dtype() != DType::bf16 && problem.dtype() != DType::f16) {
    return text("type ", problem.dtype(), ", expected bf16 or f16");
  }
  if (problem.key_dtype() != problem.dtype()) {
    return text("keys of type ", problem.key_dtype());
  }
  if (auto reason = hopper_chip_refusal(problem)) {
    return reason;
  }
  if (problem.bias && problem.bias->dtype() == DType::f64) {
    return "a bias of f64";
  }
  // Such that scale, cap and their quotient stay inside f32, and products beyond the polynomials' reach far above it.
  constexpr double largest_scale = 1e38, smallest_cap = 1e-18, largest_cap = 1e18;
  if (std::abs(problem.scale) > largest_scale * std::min(1.0, problem.softcap.value_or(1.0))) {
    return text("scale ", problem.scale);
  }
  if (problem.softcap && (*problem.softcap < smallest_cap || *problem.softcap > largest_cap)) {
    return text("softcap ", *problem.softcap, ", expected ", smallest_cap, " to ", largest_cap);
  }
  return std::nullopt;
}

std::optional<std::string> input_refusal(const Problem& problem) {
  if (auto reason = map_refusal("query", problem.query)) {
    return reason;
  }
  if (auto reason = map_refusal("key", problem.key)) {
    return reason;
  }
  return map_refusal("value", problem.value);
}

std::optional<std::string> hopper_refusal(const Problem& problem) {
  if (auto reason = kind_refusal(problem)) {
    return reason;
  }
  if (problem.spans && whole_variant(problem) != HopperVariant::spanned) {
    return "spans beside a mask, bias, softcap, ALiBi or dropout";
  }
  if (auto reason = size_refusal(problem)) {
    return reason;
  }
  return input_refusal(problem);
}

std::optional<std::string> hopper_refusal(const TensorView& out) {
  if (out.size(3) % 8 != 0) {
    return text("value_dim ", out.size(3), ", expected a multiple of 8");
  }
  return map_refusal("out", out);  // rows are stored in pieces of 16 bytes
}

Launch hopper_launch(const Problem& problem) {
  const HopperKernel kernel = kernel_of(problem);
  Launch launch;
  launch.name = name_of(variant_of(problem));
  launch.kernel = kernel.function;
  launch.threads = kernel.tile.threads();
  launch.shared_bytes = kernel.shared_bytes;
  launch.query_block = kernel.tile.rows();
  launch.key_block = kernel.tile.keys;
  launch.row_tiles = query_tiles(problem, kernel.tile);
  launch.tasks = tiles(problem, kernel.tile);
  launch.stages = kernel.tile.slots / 2;
  launch.splits = splits_of(problem);
  return launch;
}

std::size_t hopper_bytes(const Problem& problem, const Launch&) {
  const HopperTile tile = kernel_of(problem).tile;
  return (has_counter(problem, tiles(problem, tile)) ? Workspace::rounded(sizeof(int)) : 0) +
         split_shape(problem, tile).bytes() + aligned_matrix_bytes(problem);
}

cudaError_t queue_hopper(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                         Workspace& workspace) {
  const std::optional<ConstTensorView> aligned = place_aligned_matrix(problem, workspace);
  HopperArguments all = arguments_of(problem, kernel_of(problem).tile, arguments, aligned);
  if (has_counter(problem, all.tiles)) {
    all.next_tile = workspace.take_as<int>(1);
  }
  const SplitShape splits = split_shape(problem, kernel_of(problem).tile);
  if (splits.splits > 1) {
    // References are merged before they are made natural: a rounded one would be off by more than the scores.
    all.split = place_splits(splits, all.natural_scale, workspace);
    all.natural_scale = 1.0f;
  }
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  const int blocks = std::min(all.tiles, device_of(problem).multiprocessors);
  const cudaError_t result = launch_hopper(launch, blocks, all, stream);
  if (result != cudaSuccess || splits.splits == 1) {
    return result;
  }
  MergeArguments merge{arguments, all.split};
  merge.kv_heads = merge.heads;  // no rows are shared
  merge.group = 1;
  return launch_merge_splits(merge, {problem.dtype(), problem.key_dtype()}, true, stream);
}

}  // namespace headway::cuda
