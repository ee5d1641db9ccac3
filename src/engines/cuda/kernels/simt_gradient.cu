#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/simt_gradient.cuh"
#include "engines/cuda/kernels/simt_launch.cuh"
#include "engines/cuda/kernels/simt_team_gradient.cuh"

namespace headway::cuda {
namespace {

template <class T, bool KeysAreRows, int Width, class Shape>
Launch chosen(const GradientArguments& arguments) {
  using Gradient = SimtGradient<T, KeysAreRows, Width, Shape>;
  Launch launch;
  launch.name = sizeof(RealOf<T>) == 4 ? "exact f32 tiles" : "exact f64 tiles";
  launch.kernel = reinterpret_cast<const void*>(simt_gradient<T, KeysAreRows, Width, Shape>);
  launch.threads = Shape::threads;
  launch.shared_bytes = Gradient::shared_bytes(arguments);
  launch.query_block = KeysAreRows ? Shape::keys : Shape::rows;
  launch.key_block = KeysAreRows ? Shape::rows : Shape::keys;
  launch.row_tiles = blocks(KeysAreRows ? arguments.key_len : arguments.query_len, Shape::rows);
  const std::int64_t width = arguments.of == GradientOf::value ? arguments.value_dim : arguments.head_dim;
  launch.spans = blocks(width, Width);
  launch.tasks =
      arguments.batch * (KeysAreRows ? arguments.kv_heads : arguments.heads) * launch.row_tiles * launch.spans;
  return launch;
}

template <bool KeysAreRows, int Width>
Launch chosen_teams(const GradientArguments& arguments) {
  using Gradient = SimtTeamGradient<KeysAreRows, Width>;
  Launch launch;
  launch.name = "exact f32 tiles of two teams";
  launch.kernel = reinterpret_cast<const void*>(simt_team_gradient<KeysAreRows, Width>);
  launch.threads = Gradient::Thread::threads;
  launch.stages = has_shared(Gradient::shared_bytes(arguments, 2), 0) ? 2 : 1;
  launch.shared_bytes = Gradient::shared_bytes(arguments, launch.stages);
  launch.query_block = KeysAreRows ? Gradient::cols : Gradient::rows;
  launch.key_block = KeysAreRows ? Gradient::rows : Gradient::cols;
  launch.row_tiles = blocks(KeysAreRows ? arguments.key_len : arguments.query_len, Gradient::rows);
  launch.tasks = arguments.batch * (KeysAreRows ? arguments.kv_heads : arguments.heads) * launch.row_tiles;
  return launch;
}

template <bool KeysAreRows>
Launch of_teams(const GradientArguments& arguments) {
  return widest(arguments) <= 64 ? chosen_teams<KeysAreRows, 64>(arguments) : chosen_teams<KeysAreRows, 128>(arguments);
}

// Two blocks a multiprocessor.
template <class T, bool KeysAreRows>
Launch fitting(const GradientArguments& arguments) {
  const Launch usual = chosen<T, KeysAreRows, 64, SimtShape<RealOf<T>, 4>>(arguments);
  return has_shared(usual.shared_bytes) ? usual : chosen<T, KeysAreRows, 64, SmallSimtShape<RealOf<T>>>(arguments);
}

template <bool KeysAreRows>
Launch of_type(const GradientArguments& arguments, DType dtype) {
  switch (dtype) {
    case DType::f64: return fitting<double, KeysAreRows>(arguments);
    case DType::bf16: return fitting<bfloat16, KeysAreRows>(arguments);
    case DType::f16: return fitting<float16, KeysAreRows>(arguments);
    default: return fitting<float, KeysAreRows>(arguments);
  }
}

}  // namespace

bool simt_has_both(const Arguments& arguments, DType dtype) {
  // The one with the most rows needs the most shared memory.
  return dtype == DType::f32 && widest(arguments) <= 128 &&
         has_shared(SimtTeamGradient<false, 64>::shared_bytes(arguments, 1), 0);
}

Launch simt_gradient_launch(const GradientArguments& arguments, DType dtype) {
  const bool of_query = arguments.of == GradientOf::query;
  if (simt_has_both(arguments, dtype)) {
    return of_query ? of_teams<false>(arguments) : of_teams<true>(arguments);
  }
  return of_query ? of_type<false>(arguments, dtype) : of_type<true>(arguments, dtype);
}

cudaError_t launch_gradient(const Launch& launch, const GradientArguments& arguments, cudaStream_t stream) {
  GradientArguments copy = arguments;
  std::int64_t row_tiles = launch.row_tiles, spans = launch.spans;
  void* parameters[] = {&copy, &row_tiles, &spans};
  return cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                          launch.shared_bytes, stream);
}

}  // namespace headway::cuda
