// Decoding (decode.cuh) on Hopper, where the bulk copy engine brings the tiles: one thread asks for a tile's boxes of
// 64 columns, and none has addresses to compute or waits for its own copies.
#pragma once

#include "engines/cuda/kernels/decode.cuh"
#include "engines/cuda/kernels/page_entry.cuh"
#include "engines/cuda/ptx/mbarrier.cuh"
#include "engines/cuda/ptx/tma.cuh"

namespace headway::cuda {

template <int Depth, bool Paged>
class BoxedFeed {
 public:
  static constexpr bool paged = Paged;
  static constexpr bool has_clusters = true;
  // What two blocks of a multiprocessor have room for, but at 256 features.
  static constexpr int stages = Depth == 64 ? 6 : Depth == 192 ? 2 : 3;
  static constexpr int columns = 64;
  static constexpr int shared_bytes = stages * sizeof(std::uint64_t);

  __device__ BoxedFeed(const DecodeArguments& args, const DecodeTiles& tiles, unsigned char* barriers)
      : args_(args), tiles_(tiles), full_(ptx::shared_address(barriers)) {
    if (threadIdx.x == 0) {
      ptx::prefetch_map(&args.key_map);
      ptx::prefetch_map(&args.value_map);
      for (int stage = 0; stage < stages; ++stage) {
        ptx::barrier_init(barrier(stage), 1);
      }
      ptx::barrier_init_fence();
    }
    __syncthreads();
  }

  // A tile is panels of 64 columns, [64][128 bytes], swizzled.
  __device__ static int chunk_at(int row, int chunk) {
    return chunk / 8 * mma_rows * 128 + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
  }

  __device__ void open(const Sequence& sequence, std::int64_t b, std::int64_t g) {
    first_row_ = static_cast<int>(sequence.key_begin);
    batch_ = static_cast<int>(b), head_ = static_cast<int>(g);
    if constexpr (Paged) {
      last_box_ = static_cast<int>(sequence.key_count - 1) / args_.box_rows * args_.box_rows;
      next_key_ = -1;
    }
  }

  __device__ void fetch(std::int64_t key, std::int64_t end, int stage) {
    if constexpr (Paged) {
      if (key < end) {
        fetch_pages(static_cast<int>(key), stage);
      }
      return;
    }
    if (threadIdx.x == 0 && key < end) {
      ptx::barrier_expect_bytes(barrier(stage), 2 * decode_tile_bytes<Depth>);
      const int row = first_row_ + static_cast<int>(key);
      copy(tiles_.keys + stage * decode_tile_bytes<Depth>, args_.key_map, args_.key_steps, row, stage);
      copy(tiles_.values + stage * decode_tile_bytes<Depth>, args_.value_map, args_.value_steps, row, stage);
    }
  }

  __device__ void wait(int stage) {
    ptx::barrier_wait(barrier(stage), parities_ >> stage & 1);
    parities_ ^= 1u << stage;
  }

  __device__ static void finish() {}

  // The copy engine may overwrite what was written here.
  __device__ static void written() { ptx::shared_writes_to_async_fence(); }

 private:
  __device__ std::uint32_t barrier(int stage) const { return full_ + stage * sizeof(std::uint64_t); }

  // Each warp asks for every fourth box of rows, a lane for one of its panels: of K, then of V. A lane looks up its
  // page a tile ahead. Rows behind the last key are masked, so a box of them may be any that there is.
  __device__ void fetch_pages(int key, int stage) {
    constexpr int panels = Depth / 64, warps = mma_threads / 32;
    if (threadIdx.x == 0) {
      ptx::barrier_expect_bytes(barrier(stage), 2 * decode_tile_bytes<Depth>);
    }
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int panel = lane % (2 * panels), row = (warp + lane / (2 * panels) * warps) * args_.box_rows;
    if (row >= mma_rows) {
      return;
    }
    const PageEntries entries(args_.pages, batch_);
    const int at = min(key + row, last_box_);
    const int page = entries.inside(next_key_ == key ? next_page_ : entries.load(at));
    next_key_ = key + mma_rows;
    next_page_ = entries.load(min(next_key_ + row, last_box_));
    const bool of_keys = panel < panels;
    const int own = of_keys ? panel : panel - panels;
    const MapSteps steps = of_keys ? args_.key_steps : args_.value_steps;
    const unsigned char* tile = (of_keys ? tiles_.keys : tiles_.values) + stage * decode_tile_bytes<Depth>;
    ptx::copy_box(ptx::shared_address(tile + (own * mma_rows + row) * 128), of_keys ? &args_.key_map : &args_.value_map,
                  {own * 64, entries.slot_of(at), head_ * steps.head, page * steps.batch}, barrier(stage));
  }

  __device__ void copy(const unsigned char* to, const CUtensorMap& map, MapSteps steps, int row, int stage) {
#pragma unroll
    for (int panel = 0; panel < Depth / 64; ++panel) {
      ptx::copy_box(ptx::shared_address(to + panel * mma_rows * 128), &map,
                    {panel * 64, row, head_ * steps.head, batch_ * steps.batch}, barrier(stage));
    }
  }

  const DecodeArguments& args_;
  DecodeTiles tiles_;
  std::uint32_t full_, parities_ = 0;
  int first_row_ = 0, batch_ = 0, head_ = 0;
  int last_box_ = 0, next_key_ = -1, next_page_ = 0;
};

template <class T, int Depth, bool Paged>
__global__ void __launch_bounds__(mma_threads, decode_blocks<Depth>)
    hopper_decode(const __grid_constant__ DecodeArguments arguments) {
  extern __shared__ __align__(1024) unsigned char swizzled_shared[];
  decode_all<Decode<T, Depth, BoxedFeed<Depth, Paged>>>(arguments, swizzled_shared);
}

}  // namespace headway::cuda
