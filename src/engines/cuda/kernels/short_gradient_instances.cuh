// Which shapes of short_gradient.cuh there are, and their launches.
#pragma once

#include "engines/cuda/kernels/short_gradient.cuh"
#include "engines/cuda/kernels/simt_launch.cuh"

namespace headway::cuda {

inline bool short_scores_are_modified(const Arguments& arguments) {
  return arguments.softcap != 0 || arguments.bias.data != nullptr || arguments.slopes.data != nullptr ||
         arguments.dropout.active;
}

template <class T, int Depth, int KeyGroups, int Split, int BlocksAtOnce, ShortScores Scores>
Launch short_gradient_of(const ShortGradientArguments& arguments) {
  using Gradient = ShortGradient<T, Depth, KeyGroups, Split, Scores>;
  Launch launch;
  launch.name = Scores == ShortScores::modified ? "short_gradient (modified scores)" : "short_gradient";
  launch.kernel = reinterpret_cast<const void*>(short_gradient<T, Depth, KeyGroups, Split, Scores, BlocksAtOnce>);
  launch.threads = Gradient::threads;
  launch.query_block = Gradient::queries;
  launch.key_block = Gradient::keys;
  launch.row_tiles = 1;
  launch.tasks = arguments.batch * arguments.kv_heads;
  // A second tile in flight only where a block has several and its neighbours on the multiprocessor keep their room.
  const std::int64_t steps = arguments.group * blocks(arguments.query_len, Gradient::queries);
  constexpr std::size_t own = 4096, all = std::size_t{227} * 1024;
  const bool two = steps > 1 && has_shared(Gradient::shared_bytes(2)) &&
                   (all / (Gradient::shared_bytes(2) + own) >= BlocksAtOnce ||
                    launch.tasks <= device_properties(current_device()).multiprocessors);
  launch.stages = two ? 2 : 1;
  launch.shared_bytes = Gradient::shared_bytes(launch.stages);
  return launch;
}

template <int Depth, int KeyGroups, int Split, int BlocksAtOnce>
Launch short_gradient_of(const ShortGradientArguments& arguments, DType dtype) {
  const auto of_type = [&]<class T>() {
    return short_scores_are_modified(arguments)
               ? short_gradient_of<T, Depth, KeyGroups, Split, BlocksAtOnce, ShortScores::modified>(arguments)
               : short_gradient_of<T, Depth, KeyGroups, Split, BlocksAtOnce, ShortScores::scaled>(arguments);
  };
  return dtype == DType::bf16 ? of_type.template operator()<bfloat16>() : of_type.template operator()<float16>();
}

// Each in the file of its name.
Launch short_gradient_64(const ShortGradientArguments& arguments, DType dtype);
Launch short_gradient_128(const ShortGradientArguments& arguments, DType dtype);
Launch short_gradient_256(const ShortGradientArguments& arguments, DType dtype);

}  // namespace headway::cuda
