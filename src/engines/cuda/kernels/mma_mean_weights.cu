// The mean of the weights of bf16 and f16 calls, on tensor cores: mean_weights.cuh over mma_walk.cuh.
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mean_weights.cuh"
#include "engines/cuda/kernels/mma_walk.cuh"

namespace headway::cuda {
namespace {

// One tile of queries and keys, head by head; the next head's are copied while this one's are multiplied.
template <class T, int Depth>
class MmaHeads : public MmaWalk<T, Depth> {
 public:
  using Walk = MmaWalk<T, Depth>;
  using Element = T;
  using typename Walk::Scores;
  using Walk::tile_bytes, Walk::stages;
  static constexpr int tiles = 2 * stages;  // queries and keys of each stage

  static std::size_t shared_bytes() { return tiles * tile_bytes + Walk::scratch_bytes; }

  __device__ MmaHeads(const Arguments& args, unsigned char* shared) : Walk(args, shared, tiles) {}

  // prepare(h) before the product of head h, visit(scores) after it.
  template <class Prepare, class Visit>
  __device__ void walk_heads(std::int64_t key, const Prepare& prepare, const Visit& visit) {
    const auto place = [&](std::int64_t h) { return this->queries_ + h % stages * 2 * tile_bytes; };
    const auto fetch = [&](std::int64_t h) {
      if (h < this->args_.heads) {
        fill_tile<Depth>(this->queries_of(h), this->first_, place(h));
        fill_tile<Depth>(this->keys_of(h), key, place(h) + tile_bytes);
      }
      ptx::commit_copies();
    };
    if (stages > 1) {
      fetch(0);
    }
#pragma unroll 1
    for (std::int64_t h = 0; h < this->args_.heads; ++h) {
      fetch(h + stages - 1);
      this->h_ = h;
      prepare(h);
      ptx::wait_for_copies<stages - 1>();
      __syncthreads();
      Scores scores;
      multiply_rows<Depth, T>(this->thread_, place(h), place(h) + tile_bytes, scores);
      this->modify(Stage::weights, Modifiers<float>(this->args_, this->sequence_, this->b_, h), key, scores);
      visit(scores);
      __syncthreads();  // the stage may be filled again
    }
    ptx::wait_for_copies<0>();
  }
};

template <class T, int Depth>
__global__ void __launch_bounds__(mma_threads, 256 / Depth)
    mma_mean_weights(const __grid_constant__ MeanWeightsArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  mean_weights_tiles<MmaHeads<T, Depth>>(arguments, shared);
}

template <class T, int Depth>
Launch chosen(MeanWeightsArguments& arguments) {
  Launch launch;
  launch.name = "tensor core mean weights";
  launch.kernel = reinterpret_cast<const void*>(mma_mean_weights<T, Depth>);
  launch.threads = mma_threads;
  launch.shared_bytes = MmaHeads<T, Depth>::shared_bytes();
  arguments.row_tiles = blocks(arguments.query_len, mma_rows);
  arguments.key_tiles = blocks(arguments.key_len, mma_rows);
  launch.tasks = arguments.batch * arguments.row_tiles * arguments.key_tiles;
  return launch;
}

}  // namespace

Launch mma_mean_weights_launch(MeanWeightsArguments& arguments, DType dtype) {
  return of_half_type(dtype, arguments.head_dim, [&]<class T, int Depth>() { return chosen<T, Depth>(arguments); });
}

}  // namespace headway::cuda
