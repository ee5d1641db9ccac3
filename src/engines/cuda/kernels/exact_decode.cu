#include <algorithm>

#include "engines/cuda/kernels/direct_kernels.h"
#include "engines/cuda/kernels/exact_decode.cuh"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

template <int Rows>
Launch chosen(const ForwardArguments& arguments, DirectTeam team) {
  const std::int64_t rows = arguments.group * arguments.query_len;
  const TeamShared shared{team.warps, static_cast<int>(std::min<std::int64_t>(rows, Rows)),
                          static_cast<int>(arguments.value_dim), exact_features, true};
  Launch launch;
  launch.name = "decode in exact f32";
  launch.kernel = reinterpret_cast<const void*>(exact_decode<Rows>);
  launch.threads = 32 * team.warps;
  launch.shared_bytes =
      sizeof(float) * static_cast<std::size_t>(ExactDecode<Rows>::floats(shared, static_cast<int>(arguments.head_dim)));
  launch.query_block = Rows;
  launch.key_block = exact_chunk;
  launch.stages = team.warps;  // each has a chunk on its way
  launch.splits = team.blocks;
  launch.row_tiles = blocks(rows, Rows);
  launch.tasks = arguments.batch * arguments.kv_heads * launch.row_tiles * team.blocks;
  return launch;
}

}  // namespace

Launch exact_decode_launch(const ForwardArguments& arguments, DirectTeam team, std::int64_t rows) {
  return rows == 1 ? chosen<1>(arguments, team) : rows == 4 ? chosen<4>(arguments, team) : chosen<16>(arguments, team);
}

}  // namespace headway::cuda
