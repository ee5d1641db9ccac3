#include "engines/cuda/direct.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/text.h"
#include "engines/cuda/kernels/direct_kernels.h"
#include "engines/cuda/problem_arguments.h"

namespace headway::cuda {
namespace {

constexpr std::int64_t rows_of_tile = 16;

// Query rows of all heads that share a kv head; in tiles.
std::int64_t group_rows(const Problem& problem) {
  return problem.query_len * (problem.heads / std::max<std::int64_t>(problem.kv_heads, 1));
}
std::int64_t row_tiles(const Problem& problem) { return (group_rows(problem) + rows_of_tile - 1) / rows_of_tile; }

std::int64_t tasks_of(const Problem& problem) { return problem.batch * problem.kv_heads * row_tiles(problem); }

bool is_modified(const Problem& problem) {
  return problem.mask || problem.bias || problem.softcap || problem.alibi_slopes || problem.dropout.active();
}

// A row of whole aligned chunks, from one to the next in a 32-bit number of bytes.
bool is_readable(const ConstTensorView& view, std::int64_t width) {
  constexpr std::int64_t chunk = 8;
  return width > 0 && width % chunk == 0 && rows_of(view).chunks &&
         (view.size(2) <= 1 || std::abs(view.stride(2)) <= direct_most_steps);
}

// Of every kernel here.
std::optional<std::string> common_refusal(const Problem& problem) {
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
  constexpr std::int64_t most = std::int64_t{1} << 30;
  if (row_tiles(problem) > most / rows_of_tile || tasks_of(problem) > most) {
    return "more than 2^30 rows";
  }
  return std::nullopt;
}

// What the teams of a call do.
struct TeamWork {
  std::int64_t tasks;  // tiles of rows
  std::int64_t chunk;  // keys of a warp in a round
  std::int64_t bytes;  // of a key and its value
  std::int64_t waits;  // dependent loads of a round
  std::int64_t keys;
};

// How long a team would take over the keys of all tiles, in microseconds: rounds whose loads wait for each other, or
// for what the memory of the device or the path to a multiprocessor has to bring, and what a block takes besides.
double team_time(const TeamWork& work, DirectTeam team, std::int64_t multiprocessors) {
  constexpr double start = 1.5, round_start = 0.8, latency = 0.7, cluster = 0.7;  // microseconds
  constexpr double memory_rate = 4.2e6, multiprocessor_rate = 60e3;               // bytes in one
  constexpr std::int64_t resident_warps = 16;
  const std::int64_t blocks = work.tasks * team.blocks, resident = resident_warps / team.warps;
  const std::int64_t chunks = (work.keys + work.chunk - 1) / work.chunk,
                     each = (chunks + team.blocks - 1) / team.blocks;
  const std::int64_t rounds = (each + team.warps - 1) / team.warps;
  const std::int64_t together = std::min(resident, (blocks + multiprocessors - 1) / multiprocessors);
  const double here =
      static_cast<double>(work.chunk * work.bytes * together * std::min<std::int64_t>(each, team.warps));
  const double everywhere = here * static_cast<double>(std::min(multiprocessors, blocks));
  const double waiting = round_start + latency * static_cast<double>(work.waits);
  const double round = std::max({waiting, here / multiprocessor_rate, everywhere / memory_rate});
  const auto waves = static_cast<double>((blocks + multiprocessors * resident - 1) / (multiprocessors * resident));
  return waves * (start + static_cast<double>(rounds) * round) + (team.blocks > 1 ? cluster : 0.0);
}

DirectTeam team_for(const TeamWork& work, std::int64_t multiprocessors) {
  DirectTeam best{2, 1};
  double best_time = std::numeric_limits<double>::infinity();
  for (const int blocks : {1, 2, 4, 8}) {
    for (const int warps : {2, 4, 8, 16}) {
      const double time = team_time(work, {warps, blocks}, multiprocessors);
      if (time < best_time) {
        best = {warps, blocks}, best_time = time;
      }
    }
  }
  return best;
}

}  // namespace

std::optional<std::string> direct_forward_refusal(const Problem& problem) {
  if (auto reason = tensor_core_refusal(problem)) {
    return reason;
  }
  if (auto reason = common_refusal(problem)) {
    return reason;
  }
  if (!is_readable(problem.query, problem.head_dim) || !is_readable(problem.key, problem.head_dim) ||
      !is_readable(problem.value, problem.value_dim)) {
    return "rows of query, key or value are not whole aligned chunks of 16 bytes";
  }
  // Beyond these, tiles in shared memory are faster: 64 x 64 take 1.7 times as long here.
  if (problem.key_len > direct_most_keys || problem.query_len > direct_most_queries) {
    return text(problem.query_len, " queries and ", problem.key_len, " keys, expected at most ", direct_most_queries,
                " and ", direct_most_keys);
  }
  return std::nullopt;
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

// ---- In exact f32 ----

namespace {

// Of a tile.
std::int64_t exact_rows(const Problem& problem) {
  const std::int64_t rows = group_rows(problem);
  return rows == 1 ? 1 : rows <= 4 ? 4 : rows_of_tile;
}

TeamWork exact_work(const Problem& problem) {
  const std::int64_t rows = exact_rows(problem), key_passes = rows == 1 ? 1 : rows == 4 ? 2 : 4;
  return {problem.batch * problem.kv_heads * ((group_rows(problem) + rows - 1) / rows), 32,
          (problem.head_dim + problem.value_dim) * 4,
          (problem.head_dim + 63) / 64 * key_passes + (problem.value_dim + 127) / 128 * 4, problem.key_len};
}

}  // namespace

std::optional<std::string> exact_decode_refusal(const Problem& problem) {
  if (auto reason = hopper_chip_refusal(problem)) {
    return reason;
  }
  if (problem.dtype() != DType::f32) {
    return text("type ", problem.dtype(), ", expected f32");
  }
  if (auto reason = common_refusal(problem)) {
    return reason;
  }
  constexpr std::int64_t widest = 256, fewest_keys = 65;
  if (problem.dropout.active()) {
    return "dropout";
  }
  const auto suits = [](std::int64_t width) { return width > 0 && width <= widest && width % 4 == 0; };
  if (!suits(problem.head_dim) || !suits(problem.value_dim)) {
    return text("head_dim ", problem.head_dim, " and value_dim ", problem.value_dim, ", expected multiples of 4 up to ",
                widest);
  }
  if (problem.key_len < fewest_keys) {
    return text(problem.key_len, " keys, expected at least ", fewest_keys);
  }
  // More rows than one tile's read the keys again; that pays while tiles of 64 queries would leave the device idle.
  const bool few = group_rows(problem) <= rows_of_tile || tasks_of(problem) <= device_of(problem).multiprocessors;
  return few ? std::optional<std::string>() : "more query rows to a kv head than its tiles of 16 are for";
}

Launch choose_exact_decode(const Problem& problem, const ForwardArguments& arguments) {
  return exact_decode_launch(arguments, team_for(exact_work(problem), device_of(problem).multiprocessors),
                             exact_rows(problem));
}

cudaError_t queue_exact_decode(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                               Workspace&) {
  DirectArguments all{};
  static_cast<ForwardArguments&>(all) = arguments;
  all.row_tiles = static_cast<unsigned>(launch.row_tiles);
  all.tasks = static_cast<unsigned>(launch.tasks / launch.splits);
  all.rows = static_cast<unsigned>(std::min(arguments.group * arguments.query_len, launch.query_block));
  all.cluster = static_cast<unsigned>(launch.splits);
  return launch_exact_decode(launch, all, static_cast<cudaStream_t>(problem.stream));
}

}  // namespace headway::cuda
