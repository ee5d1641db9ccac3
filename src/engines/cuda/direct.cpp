#include "engines/cuda/direct.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/text.h"
#include "engines/cuda/decode.h"
#include "engines/cuda/kernels/direct_kernels.h"
#include "engines/cuda/problem_arguments.h"

namespace headway::cuda {
namespace {

constexpr std::int64_t rows_of_tile = 16;

// Query rows of all heads that share a kv head, in tiles.
std::int64_t row_tiles(const Problem& problem) {
  const std::int64_t rows = problem.query_len * (problem.heads / std::max<std::int64_t>(problem.kv_heads, 1));
  return (rows + rows_of_tile - 1) / rows_of_tile;
}

std::int64_t tasks_of(const Problem& problem) { return problem.batch * problem.kv_heads * row_tiles(problem); }

bool is_modified(const Problem& problem) {
  return problem.mask || problem.bias || problem.softcap || problem.alibi_slopes || problem.dropout.active();
}

// A row of whole aligned chunks, from one to the next in a 32-bit number of bytes.
bool is_readable(const ConstTensorView& view, std::int64_t width) {
  return width > 0 && width % 8 == 0 && rows_of(view).chunks &&
         (view.size(2) <= 1 || std::abs(view.stride(2)) <= direct_most_steps);
}

// Of every kernel here.
std::optional<std::string> common_refusal(const Problem& problem) {
  if (auto reason = tensor_core_refusal(problem)) {
    return reason;
  }
  if (problem.pages || problem.spans) {
    return problem.pages ? "keys in pages" : "spans";
  }
  // What runs must not depend on lengths, which are those of the longest sequence.
  if (problem.batch_invariant) {
    return "batch_invariant";
  }
  if (problem.batch == 0 || problem.heads == 0 || problem.query_len == 0 || problem.key_len == 0) {
    return "a size of 0";
  }
  if (!is_readable(problem.query, problem.head_dim) || !is_readable(problem.key, problem.head_dim) ||
      !is_readable(problem.value, problem.value_dim)) {
    return "rows of query, key or value are not whole aligned chunks of 16 bytes";
  }
  constexpr std::int64_t most = std::int64_t{1} << 30;
  if (row_tiles(problem) > most / rows_of_tile || tasks_of(problem) > most) {
    return "more than 2^30 rows";
  }
  return std::nullopt;
}

// Whether its warps, which share nothing but caches, are as fast as tiles in shared memory. K and V are read from L1
// for every 16 rows: up to 128 keys that takes no longer than the rows' own bytes take from memory. Modifiers cost more
// here than where they are unrolled.
bool is_quick(const Problem& problem) {
  const std::int64_t tasks = tasks_of(problem), multiprocessors = device_of(problem).multiprocessors;
  if (is_modified(problem)) {
    return problem.key_len <= 32 || tasks <= (problem.key_len <= 64 ? 16 : 4) * multiprocessors;
  }
  return problem.key_len <= 128 || tasks <= 4 * multiprocessors;
}

// How long a team would take over the keys of all tiles, in microseconds: rounds whose loads take a latency for every
// 64 features, or what the memory of the device or the path to a multiprocessor has to bring, and what a block takes
// besides.
double team_time(const Problem& problem, DirectTeam team) {
  constexpr double start = 1.5, round_start = 0.8, latency = 0.7, cluster = 0.7;  // microseconds
  constexpr double memory_rate = 4.2e6, multiprocessor_rate = 60e3;               // bytes in one
  constexpr std::int64_t chunk = 64, resident_warps = 16;
  const std::int64_t multiprocessors = device_of(problem).multiprocessors;
  const std::int64_t blocks = tasks_of(problem) * team.blocks, resident = resident_warps / team.warps;
  const std::int64_t chunks = (problem.key_len + chunk - 1) / chunk, each = (chunks + team.blocks - 1) / team.blocks;
  const std::int64_t rounds = (each + team.warps - 1) / team.warps;
  const std::int64_t together = std::min(resident, (blocks + multiprocessors - 1) / multiprocessors);
  const double bytes = static_cast<double>(chunk * (problem.head_dim + problem.value_dim) * 2);
  const double here = bytes * static_cast<double>(together * std::min<std::int64_t>(each, team.warps));
  const double everywhere = here * static_cast<double>(std::min(multiprocessors, blocks));
  const double waiting =
      round_start + latency * static_cast<double>((problem.head_dim + 63) / 64 + (problem.value_dim + 63) / 64);
  const double round = std::max({waiting, here / multiprocessor_rate, everywhere / memory_rate});
  const auto waves = static_cast<double>((blocks + multiprocessors * resident - 1) / (multiprocessors * resident));
  return waves * (start + static_cast<double>(rounds) * round) + (team.blocks > 1 ? cluster : 0.0);
}

DirectTeam team_of(const Problem& problem) {
  DirectTeam best{1, 1};
  double best_time = std::numeric_limits<double>::infinity();
  for (const int blocks : {1, 2, 4, 8}) {
    for (const int warps : {2, 4, 8, 16}) {
      const double time = team_time(problem, {warps, blocks});
      if (time < best_time) {
        best = {warps, blocks}, best_time = time;
      }
    }
  }
  return best;
}

}  // namespace

std::optional<std::string> direct_forward_refusal(const Problem& problem) {
  if (auto reason = common_refusal(problem)) {
    return reason;
  }
  if (problem.key_len > direct_most_keys) {
    return text(problem.key_len, " keys, expected at most ", direct_most_keys);
  }
  return is_quick(problem) ? std::optional<std::string>() : "more query rows than its warps are quick for";
}

Launch choose_direct_forward(const Problem& problem, const ForwardArguments& arguments) {
  // Few tasks occupy as many multiprocessors as there are; of many, neighbours share what they read.
  const std::int64_t each = tasks_of(problem) / (2 * std::int64_t{device_of(problem).multiprocessors});
  const int warps = static_cast<int>(std::clamp<std::int64_t>(each, 1, 8));
  return direct_forward_launch(arguments, problem.dtype(), is_modified(problem), warps);
}

cudaError_t queue_direct_forward(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                                 Workspace&) {
  DirectArguments all{};
  static_cast<ForwardArguments&>(all) = arguments;
  all.row_tiles = static_cast<unsigned>(launch.row_tiles);
  all.tasks = static_cast<unsigned>(launch.tasks);
  return launch_direct_forward(launch, all, static_cast<cudaStream_t>(problem.stream));
}

std::optional<std::string> direct_decode_refusal(const Problem& problem) {
  const DeviceProperties& device = device_of(problem);
  if (device.major != 9) {
    return text("compute capability ", device.major, ".", device.minor, ", expected 9.0");
  }
  if (auto reason = common_refusal(problem)) {
    return reason;
  }
  constexpr std::int64_t fewest_keys = 65;
  if (problem.key_len < fewest_keys) {
    return text(problem.key_len, " keys, expected at least ", fewest_keys);
  }
  if (!has_few_rows(problem)) {
    return "more query rows to a kv head than its tiles of 16 are for";
  }
  // Long walks keep a pipeline of bulk copies full (4.0 to 4.4 TB/s of an H200's 4.8), but for the widest tiles, of
  // which a multiprocessor holds few, and for masks and biases, which one block at a time waits for.
  const double bytes = static_cast<double>(problem.batch * problem.kv_heads * problem.key_len) *
                       static_cast<double>((problem.head_dim + problem.value_dim) * 2);
  constexpr double many_bytes = 256e6;
  const bool narrow = std::max(problem.head_dim, problem.value_dim) <= 128;
  if (bytes > many_bytes && narrow && !problem.mask && !problem.bias && !hopper_decode_refusal(problem)) {
    return "so many keys that bulk copies are as fast";
  }
  return std::nullopt;
}

Launch choose_direct_decode(const Problem& problem, const ForwardArguments& arguments) {
  return direct_decode_launch(arguments, problem.dtype(), is_modified(problem), team_of(problem));
}

cudaError_t queue_direct_decode(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                                Workspace&) {
  DirectArguments all{};
  static_cast<ForwardArguments&>(all) = arguments;
  all.row_tiles = static_cast<unsigned>(launch.row_tiles);
  all.tasks = static_cast<unsigned>(launch.tasks / launch.splits);
  all.rows = static_cast<unsigned>(std::min<std::int64_t>(arguments.group * arguments.query_len, rows_of_tile));
  all.cluster = static_cast<unsigned>(launch.splits);
  return launch_direct_decode(launch, all, static_cast<cudaStream_t>(problem.stream));
}

}  // namespace headway::cuda
