#include "engines/cuda/hopper_backward.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "core/key_range.h"
#include "core/text.h"
#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/kernels/hopper_backward_kernels.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/tensor_map.h"

namespace headway::cuda {
namespace {

constexpr std::int64_t widest = 256;
constexpr double log2_e = 1.4426950408889634;

bool has_own_ends(const Problem& problem) { return problem.valid_lens && !problem.valid_lens_per_batch; }

// Weights are 2^(this * product - lse) where nothing else changes scores.
float weight_unit(const Problem& problem) { return static_cast<float>(problem.scale * log2_e); }

// Above head dim 128 dQ has a kernel of its own, and nobody waits for another's turn.
bool has_two_kernels(const Problem& problem) { return std::max(problem.head_dim, problem.value_dim) > 128; }

// Whether so many bytes of a row along the keys can be read at once, from every such place.
bool in_pieces_of(const ConstTensorView& matrix, std::int64_t bytes) {
  const auto size = static_cast<std::int64_t>(size_of(matrix.dtype()));
  const auto fits = [&](int axis) { return matrix.stride(axis) * size % bytes == 0; };
  return matrix.stride(3) == 1 && reinterpret_cast<std::uintptr_t>(matrix.data()) % bytes == 0 && fits(0) && fits(1) &&
         fits(2);
}

// Where a matrix ends in memory if neighbouring keys are neighbours there and all steps go forward; else null.
const void* end_of_rows(const std::optional<ConstTensorView>& matrix) {
  if (!matrix || (matrix->size(3) > 1 && matrix->stride(3) != 1)) {
    return nullptr;
  }
  std::int64_t last = 0;
  for (int axis = 0; axis < 4; ++axis) {
    if (matrix->size(axis) > 1 && matrix->stride(axis) < 0) {
      return nullptr;
    }
    last += (matrix->size(axis) - 1) * matrix->stride(axis);
  }
  return static_cast<const std::uint8_t*>(matrix->data()) +
         (last + 1) * static_cast<std::int64_t>(size_of(matrix->dtype()));
}

bool mask_in_pieces(const Problem& problem) { return problem.mask && in_pieces_of(*problem.mask, 16); }

bool bias_in_pairs(const Problem& problem) {
  return problem.bias && is_half_type(problem.bias->dtype()) && in_pieces_of(*problem.bias, 4);
}

// The kernel for one modifier by itself, if that is what a call has and it is such that the kernel takes it.
std::optional<HopperBackwardVariant> single_variant(const Problem& problem) {
  const int modifiers = int{problem.softcap.has_value()} + int{problem.alibi_slopes.has_value()} +
                        int{problem.mask.has_value()} + int{problem.bias.has_value()} + int{problem.dropout.active()};
  if (modifiers != 1 || has_own_ends(problem) || has_two_kernels(problem)) {
    return std::nullopt;
  }
  using enum HopperBackwardVariant;
  if (problem.softcap) {
    // Such that products with log2(e) and quotients by it stay far from the ends of f32.
    constexpr double smallest = 1e-6, largest = 1e6;
    const double cap = *problem.softcap;
    return smallest < cap && cap < largest ? std::optional(capped) : std::nullopt;
  }
  if (problem.alibi_slopes) {
    return sloped;
  }
  if (problem.dropout.active()) {
    return dropped;
  }
  if (problem.mask) {
    return end_of_rows(problem.mask) != nullptr ? std::optional(bit_masked) : std::nullopt;
  }
  return problem.bias->dtype() == problem.dtype() && end_of_rows(problem.bias) != nullptr ? std::optional(biased)
                                                                                          : std::nullopt;
}

HopperBackwardVariant variant_of(const Problem& problem) {
  if (problem.spans && !problem.bias && !problem.mask && !has_own_ends(problem) && !problem.softcap &&
      !problem.alibi_slopes && !problem.dropout.active() && weight_unit(problem) != 0.0f) {
    return HopperBackwardVariant::spanned;
  }
  if (const auto single = single_variant(problem)) {
    return *single;
  }
  if (problem.bias || problem.mask || has_own_ends(problem)) {
    return HopperBackwardVariant::masked;
  }
  // A unit of 0 leaves no product that would say that its pair is forbidden.
  return problem.softcap || problem.alibi_slopes || problem.dropout.active() || weight_unit(problem) == 0.0f
             ? HopperBackwardVariant::modified
             : HopperBackwardVariant::ranged;
}

const char* name_of(HopperBackwardVariant variant) {
  using enum HopperBackwardVariant;
  switch (variant) {
    case capped: return "hopper_backward (softcap)";
    case sloped: return "hopper_backward (ALiBi)";
    case dropped: return "hopper_backward (dropout)";
    case spanned: return "hopper_backward (spans)";
    case modified: return "hopper_backward (modified scores)";
    case bit_masked: return "hopper_backward (mask)";
    case biased: return "hopper_backward (bias)";
    case masked: return "hopper_backward (mask or bias)";
    default: return "hopper_backward";
  }
}

HopperBackwardKernel kernel_of(const Problem& problem) {
  const HopperBackwardVariant variant = variant_of(problem);
  if (has_two_kernels(problem)) {
    return hopper_key_gradients_kernel(problem.dtype(), variant);
  }
  if (variant == HopperBackwardVariant::spanned) {
    return hopper_backward_kernel_spans(problem.dtype(), std::max(problem.head_dim, problem.value_dim) > 64);
  }
  const std::int64_t width = std::max(problem.head_dim, problem.value_dim);
  return width <= 64   ? hopper_backward_kernel_64(problem.dtype(), variant)
         : width <= 96 ? hopper_backward_kernel_96(problem.dtype(), variant)
                       : hopper_backward_kernel_128(problem.dtype(), variant);
}

// Walks that spans make shorter go straight on, as those of a band do.
TeamShape shape_of(const RangeRule& rule, bool spans) {
  const bool left = rule.left < RangeRule::unlimited, right = rule.right < RangeRule::unlimited;
  return left || spans ? TeamShape::band : right ? TeamShape::triangle : TeamShape::square;
}

std::int64_t blocks_of(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

// Query tiles of a head; of packed sequences, of all of them: see HopperBackwardArguments::first_tile.
std::int64_t tiles_a_head(const Problem& problem, const HopperBackwardTile& tile) {
  return problem.packed() ? problem.query.size(2) / tile.queries + problem.batch + 1
                          : blocks_of(problem.query_len, tile.queries);
}

std::int64_t all_tiles(const Problem& problem, const HopperBackwardTile& tile) {
  return problem.heads * tiles_a_head(problem, tile) * (problem.packed() ? 1 : problem.batch);
}

std::int64_t members(const Problem& problem, TeamShape shape) {
  const bool alone = has_two_kernels(problem);
  const std::int64_t tiles = blocks_of(problem.key_len, kernel_of(problem).tile.keys);
  return shape == TeamShape::triangle && !alone ? (tiles + 1) / 2 : tiles;
}

std::int64_t items(const Problem& problem) {
  return problem.batch * problem.kv_heads * members(problem, shape_of(range_rule(problem), problem.spans.has_value()));
}

// Teams that share out the query heads of a kv head, and the query tiles of those.
struct TeamParts {
  std::int64_t heads = 1, queries = 1;
  std::int64_t total() const { return heads * queries; }
};

// About how long a call takes, in microseconds: blocks come in waves, each of which starts and then does its steps (as
// measured on an H200), and the sums of parts are written and read.
double time_in_parts(const Problem& problem, TeamParts parts, std::int64_t whole_items, std::int64_t whole_steps) {
  constexpr double start = 4.0, step = 2.4, launch = 3.0, bytes_a_microsecond = 3.3e6;
  const std::int64_t waves = blocks_of(whole_items * parts.total(), device_of(problem).multiprocessors);
  const double steps = static_cast<double>(blocks_of(whole_steps, parts.total()));
  const double written = static_cast<double>(parts.total() * problem.batch * problem.kv_heads * problem.key_len *
                                             (problem.head_dim + problem.value_dim)) *
                         sizeof(float);
  return static_cast<double>(waves) * (start + steps * step) +
         (parts.total() == 1 ? 0.0 : launch + 2.0 * written / bytes_a_microsecond);
}

// The parts with which the device is occupied best. A pack's sequences have their bits in any pack, and in an invariant
// batch those of the pack.
TeamParts parts_of(const Problem& problem) {
  TeamParts best;
  if (has_two_kernels(problem) || problem.packed() || problem.batch_invariant || problem.kv_heads == 0) {
    return best;
  }
  const std::int64_t group = problem.heads / problem.kv_heads, whole_items = std::max<std::int64_t>(1, items(problem));
  const std::int64_t tiles = blocks_of(problem.query_len, kernel_of(problem).tile.queries);
  // A part has two query tiles or more. Spans have walks of their own.
  const std::int64_t most_queries = problem.spans ? 1 : std::max<std::int64_t>(1, tiles / 2);
  const std::int64_t most = 4 * device_of(problem).multiprocessors / whole_items;
  constexpr double gain = 0.95;  // that makes it worth while
  double least = gain * time_in_parts(problem, best, whole_items, group * tiles);
  for (std::int64_t heads = 1; heads <= std::min(most, group); ++heads) {
    for (std::int64_t queries = 1; group % heads == 0 && queries <= std::min(most / heads, most_queries); ++queries) {
      const TeamParts parts{heads, queries};
      if (const double time = time_in_parts(problem, parts, whole_items, group * tiles);
          parts.total() > 1 && time < least) {
        best = parts;
        least = gain * time;
      }
    }
  }
  return best;
}

// Members of a team that run at once, as a rule: as many as can.
std::int64_t usual_chunk(const Problem& problem) { return std::min(largest_chunk, device_of(problem).multiprocessors); }

// Where a team has more members than query tiles to add to, they wait for each other; the more heads are at work, the
// less. A tile takes additions one after another, each a few microseconds after the last, so as many members as there
// are tiles run at once, and more where there are too few heads to occupy the device. A pack's sequences have their
// bits in any pack, and in an invariant batch those of the pack.
std::int64_t chunk_of(const Problem& problem, TeamShape shape) {
  const std::int64_t usual = usual_chunk(problem);
  if (problem.packed() || problem.batch_invariant) {
    return usual;
  }
  const TeamParts parts = parts_of(problem);
  const std::int64_t heads = problem.batch * problem.kv_heads * parts.total();
  const std::int64_t steps =
      problem.heads / problem.kv_heads * blocks_of(problem.query_len, kernel_of(problem).tile.queries) / parts.total();
  if (has_two_kernels(problem) || steps >= std::min(usual, members(problem, shape))) {
    return usual;
  }
  return std::min(usual, std::max(steps, blocks_of(device_of(problem).multiprocessors, heads)));
}

// dK and dV of all teams.
struct PartBytes {
  std::size_t keys = 0, values = 0;
};

PartBytes part_bytes(const Problem& problem) {
  const std::int64_t parts = parts_of(problem).total();
  if (parts == 1) {
    return {};
  }
  const auto rows = static_cast<std::size_t>(problem.batch * problem.kv_heads * parts * problem.key_len);
  return {Workspace::rounded(rows * static_cast<std::size_t>(problem.head_dim) * sizeof(float)),
          Workspace::rounded(rows * static_cast<std::size_t>(problem.value_dim) * sizeof(float))};
}

// Of the kernel for dQ alone.
std::int64_t query_tiles(const Problem& problem) {
  return blocks_of(problem.query_len, kernel_of(problem).tile.queries * HopperBackwardTile::consumers);
}

// Heads whose tiles run together, where dQ has a kernel of its own: like the forward's, with a smaller part of L2.
int head_group(const Problem& problem) {
  const std::int64_t multiprocessors = device_of(problem).multiprocessors;
  if (problem.causal == Causal::none) {
    return static_cast<int>(multiprocessors / query_tiles(problem) + 1);
  }
  constexpr std::int64_t cached_bytes = std::int64_t{32} << 20;
  const std::int64_t head_bytes =
      std::max(problem.query_len, problem.key_len) * (problem.head_dim + problem.value_dim) * 2;
  return static_cast<int>(std::clamp<std::int64_t>(cached_bytes / head_bytes, 4, 32));
}

// One for each multiprocessor, but no more than there is work for.
unsigned grid_blocks(const Problem& problem, std::int64_t tasks) {
  const std::int64_t multiprocessors = device_of(problem).multiprocessors;
  return static_cast<unsigned>(std::min(tasks, multiprocessors));
}

// Scores in natural units where a bias may be added to them, or several modifiers are applied; else weights come from
// products in one step. The kernel for softcap alone works on score / cap.
void place_scale(const Problem& problem, HopperBackwardArguments& arguments) {
  const HopperBackwardVariant variant = variant_of(problem);
  const bool capped = variant == HopperBackwardVariant::capped;
  const bool natural = variant == HopperBackwardVariant::modified || has_matrix(variant);
  const double unit = problem.scale / problem.softcap.value_or(1.0);
  arguments.unit = static_cast<float>(unit);
  arguments.multiply = true;
  arguments.weight_unit = capped ? static_cast<float>(*problem.softcap * log2_e) : weight_unit(problem);
  arguments.lse_unit = natural ? 1.0f : static_cast<float>(log2_e);
  if (problem.softcap) {
    arguments.inverse_cap = static_cast<float>(1.0 / *problem.softcap);
    place_softcap(capped ? 1.0 : *problem.softcap, unit, arguments);
  }
}

// Whether all keys are in one tile that every query tile sees: then dQ is no sum over blocks of threads.
bool has_whole_query_gradients(const Problem& problem) {
  const RangeRule rule = range_rule(problem);
  const bool first_row_sees =
      rule.right >= RangeRule::unlimited || rule.alignment == Alignment::starts || problem.key_len >= problem.query_len;
  return !has_two_kernels(problem) && problem.key_len <= kernel_of(problem).tile.keys && !problem.packed() &&
         !problem.spans && !problem.valid_lens && !problem.query_lens && rule.left >= RangeRule::unlimited &&
         rule.alignment != Alignment::given && first_row_sees;
}

int bounded_distance(std::int64_t distance) {
  return static_cast<int>(std::min<std::int64_t>(distance, std::int64_t{1} << 29));
}

HopperBackwardArguments arguments_of(const BackwardProblem& problem, const HopperBackwardTile& tile,
                                     const Arguments& arguments) {
  HopperBackwardArguments result{};
  static_cast<Arguments&>(result) = arguments;
  result.query_map = tensor_map(problem.query, tile.queries, problem.operation);
  result.grad_out_map = tensor_map(problem.grad_out, tile.queries, problem.operation);
  result.key_map = tensor_map(problem.key, tile.keys, problem.operation);
  result.value_map = tensor_map(problem.value, tile.keys, problem.operation);
  result.query_steps = steps_of(problem.query);
  result.grad_out_steps = steps_of(problem.grad_out);
  result.key_steps = steps_of(problem.key);
  result.value_steps = steps_of(problem.value);
  place_scale(problem, result);
  result.kept = static_cast<float>(problem.dropout.kept_scale);
  result.lse = row_values_of(problem.lse);
  result.grad_out = rows_of(problem.grad_out);
  const auto place = [](const std::optional<TensorView>& view, Rows& rows) {
    if (view) {
      rows = rows_of(*view);
    }
  };
  place(problem.dq, result.query_gradient);
  place(problem.dk, result.key_gradient);
  place(problem.dv, result.value_gradient);
  result.shape = shape_of(arguments.rule, problem.spans.has_value());
  result.left = bounded_distance(arguments.rule.left);
  result.right = bounded_distance(arguments.rule.right);
  result.members = static_cast<int>(members(problem, result.shape));
  result.items = static_cast<int>(items(problem));
  result.chunk = static_cast<int>(chunk_of(problem, result.shape));
  result.spread = !problem.spans && result.chunk < result.members && result.chunk < usual_chunk(problem);
  result.own_ends = has_own_ends(problem);
  result.mask_in_pieces = mask_in_pieces(problem);
  result.bias_in_pairs = bias_in_pairs(problem);
  result.bias_in_chunks = problem.bias && in_pieces_of(*problem.bias, 16);
  result.mask_end = end_of_rows(problem.mask);
  result.bias_end = end_of_rows(problem.bias);
  result.tiles_a_head = tiles_a_head(problem, tile);
  result.whole_query_gradients = has_whole_query_gradients(problem);
  if (result.whole_query_gradients && problem.dq) {
    result.query_gradient_map = tensor_map(*problem.dq, tile.queries, problem.operation);
    result.query_gradient_steps = steps_of(*problem.dq);
  }
  if (has_two_kernels(problem)) {
    result.query_tiles = static_cast<int>(query_tiles(problem));
    result.tiles = static_cast<int>(problem.batch * problem.heads * query_tiles(problem));
    result.head_group = head_group(problem);
  }
  return result;
}

// Arrays over query tiles.
struct TileBytes {
  std::size_t rows, sums, numbers;
};

TileBytes tile_bytes(const Problem& problem, const HopperBackwardTile& tile) {
  const auto tiles = static_cast<std::size_t>(all_tiles(problem, tile));
  return {tiles * static_cast<std::size_t>(tile.queries) * sizeof(float),
          has_two_kernels(problem) || has_whole_query_gradients(problem)
              ? 0
              : tiles * static_cast<std::size_t>(tile.gradient_numbers()) * sizeof(float),
          tiles * sizeof(int)};
}

std::optional<std::string> size_refusal(const Problem& problem) {
  if (problem.head_dim < 1 || problem.head_dim > widest || problem.value_dim < 1 || problem.value_dim > widest) {
    return text("head_dim ", problem.head_dim, " and value_dim ", problem.value_dim, ", expected 1 to ", widest);
  }
  if (problem.head_dim % 8 != 0 || problem.value_dim % 8 != 0) {
    return text("head_dim ", problem.head_dim, " and value_dim ", problem.value_dim, ", expected multiples of 8");
  }
  if (problem.batch == 0 || problem.heads == 0 || problem.query_len == 0 || problem.key_len == 0) {
    return "a size of 0";
  }
  constexpr std::int64_t most = std::int64_t{1} << 28;
  const HopperBackwardTile tile = kernel_of(problem).tile;
  const std::int64_t group_tiles = problem.heads / problem.kv_heads * tiles_a_head(problem, tile);
  if (problem.query.size(2) > most || problem.key.size(2) > most || all_tiles(problem, tile) > most ||
      items(problem) > most || problem.batch * problem.heads * blocks_of(problem.query_len, tile.queries) > most ||
      group_tiles * largest_chunk > most) {
    return "more than 2^28 positions or tiles";
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> hopper_backward_refusal(const Problem& problem) {
  if (auto reason = kind_refusal(problem)) {
    return reason;
  }
  if (problem.spans && (variant_of(problem) != HopperBackwardVariant::spanned || has_two_kernels(problem))) {
    return "spans beside another option, or of heads wider than 128";
  }
  if (auto reason = extreme_scale(problem)) {
    return reason;
  }
  if (auto reason = size_refusal(problem)) {
    return reason;
  }
  return input_refusal(problem);
}

std::optional<std::string> hopper_gradient_refusal(const BackwardProblem& problem) {
  if (!problem.dq && !problem.dk && !problem.dv) {
    return "neither dq nor dk nor dv is asked for";
  }
  if (auto reason = map_refusal("grad_out", problem.grad_out)) {
    return reason;
  }
  // Rows of gradients are stored in pieces of 16 bytes.
  const std::pair<const char*, const std::optional<TensorView>*> gradients[] = {{"the gradient of query", &problem.dq},
                                                                                {"the gradient of key", &problem.dk},
                                                                                {"the gradient of value", &problem.dv}};
  for (const auto& [name, gradient] : gradients) {
    if (*gradient) {
      if (auto reason = map_refusal(name, **gradient)) {
        return reason;
      }
    }
  }
  return std::nullopt;
}

Launch hopper_backward_launch(const Problem& problem) {
  const HopperBackwardKernel kernel = kernel_of(problem);
  Launch launch;
  launch.name = name_of(variant_of(problem));
  launch.kernel = kernel.function;
  launch.threads = HopperBackwardTile::threads;
  launch.shared_bytes = kernel.shared_bytes;
  launch.query_block = kernel.tile.queries;
  launch.key_block = kernel.tile.keys;
  launch.row_tiles = blocks_of(problem.key_len, kernel.tile.keys);
  launch.tasks = problem.batch * problem.kv_heads * launch.row_tiles * parts_of(problem).total();
  launch.stages = HopperBackwardTile::stages;
  return launch;
}

int hopper_backward_rows_a_tile(const Problem& problem) { return kernel_of(problem).tile.queries; }

std::size_t hopper_backward_bytes(const Problem& problem) {
  const TileBytes bytes = tile_bytes(problem, kernel_of(problem).tile);
  return Workspace::rounded(bytes.sums) + 2 * Workspace::rounded(bytes.rows) + 2 * Workspace::rounded(bytes.numbers) +
         Workspace::rounded(2 * sizeof(int)) + part_bytes(problem).keys + part_bytes(problem).values;
}

std::int64_t hopper_backward_parts(const Problem& problem) { return parts_of(problem).total(); }

namespace {

void launch(const BackwardProblem& problem, const HopperBackwardKernel& kernel, std::int64_t tasks,
            std::optional<cudaLaunchAttribute> attribute, HopperBackwardArguments& all, const char* what) {
  allow_shared(kernel.function, kernel.shared_bytes, problem.operation);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid_blocks(problem, tasks));
  config.blockDim = dim3(HopperBackwardTile::threads);
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.stream = static_cast<cudaStream_t>(problem.stream);
  config.attrs = attribute ? &*attribute : nullptr;
  config.numAttrs = attribute ? 1 : 0;
  void* parameters[] = {&all};
  check(cudaLaunchKernelExC(&config, kernel.function, parameters), problem.operation, what);
}

// The kernel before may still run.
cudaLaunchAttribute early() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

cudaLaunchAttribute cooperative() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return attribute;
}

// Up to head dim 128. Blocks that add to the same sums wait for each other, so all have to run at once: a cooperative
// launch is one that does or fails. Others may begin before the row statistics are there.
void launch_teams(const BackwardProblem& problem, const HopperBackwardKernel& kernel, HopperBackwardArguments& all) {
  launch(problem, kernel, all.items, all.whole_query_gradients ? early() : cooperative(), all,
         "launching hopper_backward");
}

// Several teams for a kv head, and the sums of what they find.
void launch_in_parts(const BackwardProblem& problem, const HopperBackwardKernel& kernel,
                     const HopperBackwardArguments& whole, Workspace& workspace) {
  const PartBytes bytes = part_bytes(problem);
  const TeamParts parts = parts_of(problem);
  HopperBackwardArguments all = whole;
  all.key_parts = static_cast<float*>(workspace.take(bytes.keys));
  all.value_parts = static_cast<float*>(workspace.take(bytes.values));
  HopperBackwardArguments teams = all;
  teams.parts = static_cast<int>(parts.total());
  teams.query_parts = static_cast<int>(parts.queries);
  teams.kv_heads *= parts.total();
  teams.group /= parts.heads;
  teams.items *= teams.parts;
  launch_teams(problem, kernel, teams);
  check(launch_backward_parts(all, problem.dtype(), teams.parts, static_cast<cudaStream_t>(problem.stream)),
        problem.operation, "launching the sums of parts");
}

}  // namespace

void queue_hopper_backward(const BackwardProblem& problem, const Arguments& arguments, const CoarseRows& coarse,
                           Workspace& workspace) {
  const HopperBackwardKernel kernel = kernel_of(problem);
  const TileBytes bytes = tile_bytes(problem, kernel.tile);
  const bool two = has_two_kernels(problem);
  HopperBackwardArguments all = arguments_of(problem, kernel.tile, arguments);
  all.coarse = coarse;
  all.tile_sums = bytes.sums == 0 ? nullptr : static_cast<float*>(workspace.take(bytes.sums));
  all.tile_lse = static_cast<float*>(workspace.take(bytes.rows));
  all.tile_delta = static_cast<float*>(workspace.take(bytes.rows));
  all.tile_turns = static_cast<int*>(workspace.take(bytes.numbers));
  all.tile_poisoned = static_cast<int*>(workspace.take(bytes.numbers));
  all.next_item = workspace.take_as<int>(2);
  all.next_tile = two ? all.next_item + 1 : nullptr;
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  check(launch_backward_rows(all, rows_of(problem.out), problem.dtype(), kernel.tile, stream), problem.operation,
        "launching the row statistics");
  if (!two && parts_of(problem).total() > 1) {
    launch_in_parts(problem, kernel, all, workspace);
  } else if (!two) {
    launch_teams(problem, kernel, all);
  }
  const bool of_keys = two && (problem.dk || problem.dv);
  if (of_keys) {
    launch(problem, kernel, all.items, std::nullopt, all, "launching hopper_key_gradients");
  }
  if (two && problem.dq) {  // beside the kernel of the keys, if there is one
    launch(problem, hopper_query_gradients_kernel(problem.dtype(), variant_of(problem)), all.tiles,
           of_keys ? std::optional(early()) : std::nullopt, all, "launching hopper_query_gradients");
  }
  check(launch_backward_finish(all, problem.dtype(), kernel.tile, stream), problem.operation,
        "launching the query gradients");
}

}  // namespace headway::cuda
