// Gradients of key and value on Hopper at head dims up to 256; hopper_query_gradients.cuh has the query's.
//
// dK and dV of 64 keys fill half of the registers of a multiprocessor, so a block of threads owns 64 keys, and its two
// consumer warpgroups share the products of each step over 64 queries, not the keys:
//   scores:     S^T = K Q^T   P = exp(S - lse)                    dV += P^T dO
//   gradients:  dP^T = V dO^T   dS = P (dP - delta)               dK += dS^T Q
// P goes from one to the other through shared memory as f32, from each thread to the one that holds the same pairs.
// While one warpgroup is busy with exponentials or differences, the other's products run. Every sum stays in one place
// from its first term to the last, in the order of the walk: the same bits always, and nobody waits for another block.
//
// Bytes: K, V, dK, dV move once; Q and dO are read by each key tile that sees them, 64 KiB a step, from L2.
//
// Bound: shared memory. A step's four products take 2048 cycles of the tensor cores and read 192 KiB, P is written and
// read (32 KiB), and the copies write 64 KiB: 2300 cycles at 128 bytes each. The separate dQ needs S and dP again,
// 7 products instead of 5; what that costs is less than room for dQ would, f32 sums of 64 KiB a step beside the tiles.
#pragma once

#include <type_traits>

#include "engines/cuda/kernels/hopper_backward_guard.cuh"
#include "engines/cuda/kernels/hopper_backward_loader.cuh"
#include "engines/cuda/kernels/hopper_backward_weights.cuh"
#include "engines/cuda/kernels/hopper_block.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"
#include "engines/cuda/ptx/wgmma.cuh"

namespace headway::cuda {

template <HopperBackwardVariant variant>
struct alignas(tile_alignment) KeyGradientsMemory {
  static constexpr HopperBackwardTile tile = hopper_backward_tile(256, variant);
  static constexpr int stages = HopperBackwardTile::stages;
  static constexpr bool edges_everywhere = variant == HopperBackwardVariant::masked;
  static constexpr bool sums_over_keys = false;

  std::uint8_t keys[tile.key_bytes()];
  std::uint8_t values[tile.key_bytes()];
  std::uint8_t queries[stages][tile.query_bytes()];
  std::uint8_t grad_outs[stages][tile.query_bytes()];
  float weights[stages][tile.keys * tile.queries];  // what dS takes; negative where dropout lets nothing through
  float lse[stages][tile.queries];
  float delta[stages][tile.queries];
  std::uint64_t keys_full, keys_empty;
  std::uint64_t queries_full[stages], queries_empty[stages];
  std::uint64_t grad_outs_full[stages], grad_outs_empty[stages];
  std::uint64_t grad_outs_checked[stages], queries_checked[stages];  // at edges; keys with the queries
  std::uint64_t weights_full[stages], weights_empty[stages];
  std::uint64_t post_full[2], post_empty[2];
  BackwardStep steps[stages];
  BackwardPost posts[2];
};

// Takes key tiles from a counter, in groups of heads and of a group the first tiles first: with a causal mask they are
// the longest, and the short ones fill the gaps at the end.
template <class Memory>
class KeyGradientsProducer {
 public:
  __device__ __forceinline__ KeyGradientsProducer(const HopperBackwardArguments& args, Memory& memory)
      : args_(args), loader_(args, memory) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int item = atomicAdd(args_.next_item, 1); item < args_.items; item = atomicAdd(args_.next_item, 1)) {
      const int group_items = args_.head_group * args_.members;
      const int group = item / group_items, within = item - group * group_items;
      const int first_head = group * args_.head_group;
      const int heads = min(args_.head_group, args_.items / args_.members - first_head);
      const int key_tile = within / heads;
      work_on(first_head + within - key_tile * heads, key_tile);
    }
    loader_.finish();
  }

 private:
  __device__ __forceinline__ void work_on(int head, int key_tile) {
    loader_.wait_for_post();
    loader_.describe(head);
    BackwardPost& post = loader_.post();
    if (key_tile * Memory::tile.keys >= post.key_count) {
      return;  // of a longer sequence than this one
    }
    const TileSpan queries = post.sequence.queries_of(key_tile);
    const int group = post.sequence.group, steps = group * queries.count();
    loader_.post_tile(post, key_tile, steps);
    BackwardPosition at{0, queries.begin};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const BackwardStep loaded = loader_.step_at(post, key_tile, at, step == 0, step == steps - 1);
      loader_.load_queries(loaded);
      if (step == 0) {
        loader_.load_keys(post);
      }
      loader_.load_grad_outs(loaded);
      loader_.advance();
      if (++at.tile == queries.end) {
        at = {at.head + 1, queries.begin};
      }
    }
  }

  const HopperBackwardArguments& args_;
  BackwardLoader<Memory> loader_;
};

// What both consumers have in common.
template <class Half, HopperBackwardVariant variant>
class KeyGradientsConsumer {
 public:
  using Memory = KeyGradientsMemory<variant>;
  static constexpr HopperBackwardTile tile = Memory::tile;
  static constexpr bool masked = variant == HopperBackwardVariant::masked;
  static constexpr bool modified = variant != HopperBackwardVariant::ranged;
  static constexpr int pairs = tile.queries / 2;  // that a thread holds

  __device__ __forceinline__ KeyGradientsConsumer(const HopperBackwardArguments& args, Memory& memory, int warp,
                                                  int lane)
      : args_(args), memory_(memory), shared_(memory), thread_(warp * 32 + lane) {}

 protected:
  // differentiate(post) for each post.
  template <class Differentiate>
  __device__ __forceinline__ void each_post(const Differentiate& differentiate) {
    PostPosition position;
#pragma unroll 1
    while (true) {
      wait(offsetof(Memory, post_full), position.slot, position.parity);
      const BackwardPost& post = memory_.posts[position.slot];
      if (post.finished) {
        return;
      }
      differentiate(post);
      release(offsetof(Memory, post_empty), position.slot);
      position.advance();
    }
  }

  // Sums over a post's steps: begin() multiplies for the first, step(more) takes one and multiplies for the next if
  // there are more.
  template <class Begin, class Step>
  __device__ __forceinline__ void sum_steps(const BackwardPost& post, float (&sums)[tile.head_dim / 2],
                                            const Begin& begin, const Step& step) {
#pragma unroll
    for (int i = 0; i < tile.head_dim / 2; ++i) {
      sums[i] = 0.0f;
    }
    const int steps = __shfl_sync(~0u, post.steps, 0);
    if (steps > 0) {
      wait(offsetof(Memory, keys_full), 0, post.keys_parity);
      begin();
#pragma unroll 1
      for (int left = steps; left > 1; --left) {
        step(std::true_type());
      }
      release(offsetof(Memory, keys_empty));
      step(std::false_type());
    }
  }

  // P^T [64 keys, 64 queries] of rows of keys (or values) with those of queries (or output gradients).
  __device__ __forceinline__ void multiply_pairs(std::uint32_t own, std::uint32_t other, float (&products)[pairs]) {
    const std::uint64_t a = ptx::tile_descriptor(own, 16), b = ptx::tile_descriptor(other, 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile.head_dim / 16; ++k) {
      ptx::Wgmma<Half, tile.queries>::multiply(products, a + k / 4 * (tile.keys * 8) + k % 4 * 2,
                                               b + k / 4 * (tile.queries * 8) + k % 4 * 2, k != 0);
    }
    ptx::wgmma_commit();
  }

  // sums [64 keys, head_dim] += pairs [64 keys, 64 queries] rows [64 queries, head_dim]
  __device__ __forceinline__ void add_rows(const std::uint32_t (&packed)[pairs / 2], std::uint32_t rows,
                                           float (&sums)[tile.head_dim / 2]) {
    const std::uint64_t b = ptx::tile_descriptor(rows, tile.queries * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile.queries / 16; ++k) {
      ptx::Wgmma<Half, tile.head_dim>::template multiply<ptx::Reduced::along_rows>(
          sums, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3], b + k * 128, 1);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ std::uint32_t queries_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, queries), slot, tile.query_bytes());
  }
  __device__ __forceinline__ std::uint32_t grad_outs_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, grad_outs), slot, tile.query_bytes());
  }

  // The same thread of both consumers has the same pairs, so the order of threads is free of conflicts.
  __device__ __forceinline__ float4* weights_at(std::uint32_t slot, int chunk) {
    return reinterpret_cast<float4*>(memory_.weights[slot]) + chunk * 128 + thread_;
  }

  __device__ __forceinline__ void store(const BackwardPost& post, const Rows& rows, std::int64_t width, float factor,
                                        const float (&sums)[tile.head_dim / 2]) {
    if (rows.data == nullptr) {
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = post.key_tile * tile.keys + thread_ / 32 * 16 + lane() / 4 + 8 * r;
      Half* row = static_cast<Half*>(rows.data) + row_offset(rows, post.batch, post.kv_head, post.key_begin + key);
      store_row(row, sums, r, factor, lane() & 3, static_cast<int>(width), key < post.key_count, false);
    }
  }

  // ---- Steps and barriers ----

  __device__ __forceinline__ int lane() const { return thread_ & 31; }
  __device__ __forceinline__ std::uint32_t slot() const { return steps_ & 1; }
  __device__ __forceinline__ std::uint32_t parity() const { return steps_ >> 1 & 1; }

  __device__ __forceinline__ bool is_edge() const {
    return masked || (__shfl_sync(~0u, memory_.steps[slot()].flags, 0) & BackwardStep::edge) != 0;
  }

  __device__ __forceinline__ void wait(std::size_t offset, std::uint32_t index, std::uint32_t phase) const {
    ptx::barrier_wait(shared_.of(offset, index), phase);
  }

  // By every thread: each has read or written for itself.
  __device__ __forceinline__ void release(std::size_t offset, std::uint32_t index = 0) const {
    ptx::barrier_arrive(shared_.of(offset, index));
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  const int thread_;         // of this consumer
  std::uint32_t steps_ = 0;  // so far
};

template <class Half, HopperBackwardVariant variant>
class ScoreConsumer : KeyGradientsConsumer<Half, variant> {
  using Base = KeyGradientsConsumer<Half, variant>;
  using Base::args_, Base::memory_, Base::shared_, Base::steps_, Base::tile, Base::pairs;
  using typename Base::Memory;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    this->each_post([&](const BackwardPost& post) { differentiate(post); });
  }

 private:
  __device__ __forceinline__ void differentiate(const BackwardPost& post) {
    const auto begin = [&] {
      multiply_scores(this->slot(), this->parity());
      ptx::wgmma_wait<0>();
      ptx::touch(scores_);
    };
    this->sum_steps(post, sums_, begin, [&](auto more) { step<more()>(post); });
    this->store(post, args_.value_gradient, args_.value_dim, Base::modified ? args_.kept : 1.0f, sums_);
  }

  __device__ __forceinline__ void multiply_scores(std::uint32_t slot, std::uint32_t parity) {
    this->wait(offsetof(Memory, queries_full), slot, parity);
    this->multiply_pairs(shared_.of(offsetof(Memory, keys)), this->queries_at(slot), scores_);
  }

  // With the scores of this step there: its weights, its part of dV, and the scores of the next.
  template <bool more>
  __device__ __forceinline__ void step(const BackwardPost& post) {
    steps_ = ptx::kept(steps_);
    const std::uint32_t slot = this->slot(), parity = this->parity();
    const bool edge = this->is_edge();
    AllowedPairs<pairs> kept;
    weigh(post, edge, kept);
    this->wait(offsetof(Memory, weights_empty), slot, parity ^ 1);
    hand_over(slot, kept);
    this->release(offsetof(Memory, weights_full), slot);
    this->release(offsetof(Memory, queries_empty), slot);  // lse has been read too
    this->wait(offsetof(Memory, grad_outs_full), slot, parity);
    if (edge) {
      this->wait(offsetof(Memory, grad_outs_checked), slot, parity);
    }
    ptx::touch(sums_);
    ptx::touch(weights_);
    this->add_rows(weights_, this->grad_outs_at(slot), sums_);
    if constexpr (more) {
      multiply_scores(slot ^ 1, slot == 1 ? parity ^ 1 : parity);
    }
    ptx::wgmma_wait<more ? 1 : 0>();
    ptx::touch(sums_);
    this->release(offsetof(Memory, grad_outs_empty), slot);
    if constexpr (more) {
      ptx::wgmma_wait<0>();
      ptx::touch(scores_);
    }
    ++steps_;
  }

  __device__ __forceinline__ BackwardPairs own_pairs(const BackwardPost& post) const {
    const BackwardStep& at = memory_.steps[this->slot()];
    const int thread = this->thread_, lane = this->lane();
    return {post.batch, at.head, post.key_tile * tile.keys + thread / 32 * 16 + lane / 4, at.row + 2 * (lane & 3)};
  }

  __device__ __forceinline__ void weigh(const BackwardPost& post, bool edge, AllowedPairs<pairs>& kept) {
    const std::uint32_t lse = shared_.of(offsetof(Memory, lse), this->slot(), tile.queries * 4);
    const BackwardPairs own = own_pairs(post);
    if constexpr (Base::modified) {
      ScoreModifiers<pairs, Base::masked ? pairs : 1> modifiers;
      find_modifiers<Base::masked>(args_, post, own, edge, this->lane(), modifiers);
      kept = modifiers.kept;
      scale_scores(args_, scores_);
#pragma unroll
      for (int k = 0; k < pairs / 8; ++k) {
        make_modified_weights<Half>(args_, modifiers, four_columns(lse, this->lane(), k), k, scores_, weights_);
      }
    } else {
      const auto lse_of = [&](int k) { return four_columns(lse, this->lane(), k); };
      if (edge) {
        forbid_products(args_, post.sequence, own, lse_of, scores_);
      }
#pragma unroll
      for (int k = 0; k < pairs / 8; ++k) {
        make_weights(args_, lse_of(k), edge ? lowest_lse : NAN, k, scores_);
        pack_weights<Half>(k, scores_, weights_);
      }
    }
  }

  // Weights are never negative: the sign says what dropout does.
  __device__ __forceinline__ void hand_over(std::uint32_t slot, const AllowedPairs<pairs>& kept) {
    if (Base::modified && args_.dropout.active) {
#pragma unroll
      for (int e = 0; e < pairs; ++e) {
        scores_[e] = copysignf(scores_[e], kept.get(e) ? 1.0f : -1.0f);
      }
    }
#pragma unroll
    for (int c = 0; c < pairs / 4; ++c) {
      *this->weights_at(slot, c) = {scores_[4 * c], scores_[4 * c + 1], scores_[4 * c + 2], scores_[4 * c + 3]};
    }
  }

  float sums_[tile.head_dim / 2];  // dV
  float scores_[pairs];
  std::uint32_t weights_[pairs / 2];
};

template <class Half, HopperBackwardVariant variant>
class GradientConsumer : KeyGradientsConsumer<Half, variant> {
  using Base = KeyGradientsConsumer<Half, variant>;
  using Base::args_, Base::memory_, Base::shared_, Base::steps_, Base::tile, Base::pairs;
  using typename Base::Memory;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    this->each_post([&](const BackwardPost& post) { differentiate(post); });
  }

 private:
  __device__ __forceinline__ void differentiate(const BackwardPost& post) {
    const auto begin = [&] {
      multiply_upstream(this->slot(), this->parity());
      ptx::wgmma_wait<0>();
      ptx::touch(upstream_);
    };
    this->sum_steps(post, sums_, begin, [&](auto more) { step<more()>(); });
    this->store(post, args_.key_gradient, args_.head_dim, static_cast<float>(args_.scale), sums_);
  }

  __device__ __forceinline__ void multiply_upstream(std::uint32_t slot, std::uint32_t parity) {
    this->wait(offsetof(Memory, grad_outs_full), slot, parity);
    this->multiply_pairs(shared_.of(offsetof(Memory, values)), this->grad_outs_at(slot), upstream_);
  }

  // With dP of this step there: its dS, its part of dK, and dP of the next.
  template <bool more>
  __device__ __forceinline__ void step() {
    steps_ = ptx::kept(steps_);
    const std::uint32_t slot = this->slot(), parity = this->parity();
    this->wait(offsetof(Memory, queries_full), slot, parity);
    const bool edge = this->is_edge();
    this->wait(offsetof(Memory, weights_full), slot, parity);
    make_score_gradients(slot, edge);
    this->release(offsetof(Memory, weights_empty), slot);
    this->release(offsetof(Memory, grad_outs_empty), slot);  // delta has been read too
    if (edge) {
      this->wait(offsetof(Memory, queries_checked), slot, parity);
    }
    ptx::touch(sums_);
    ptx::touch(score_gradients_);
    this->add_rows(score_gradients_, this->queries_at(slot), sums_);
    if constexpr (more) {
      multiply_upstream(slot ^ 1, slot == 1 ? parity ^ 1 : parity);
    }
    ptx::wgmma_wait<more ? 1 : 0>();
    ptx::touch(sums_);
    this->release(offsetof(Memory, queries_empty), slot);
    if constexpr (more) {
      ptx::wgmma_wait<0>();
      ptx::touch(upstream_);
    }
    ++steps_;
  }

  // dS = P (dP - delta), 0 where P is 0 at an edge: whatever comes from upstream.
  __device__ __forceinline__ void make_score_gradients(std::uint32_t slot, bool edge) {
    const std::uint32_t deltas = shared_.of(offsetof(Memory, delta), slot, tile.queries * 4);
    const float kept = Base::modified ? args_.kept : 1.0f;  // 1 without dropout
#pragma unroll
    for (int k = 0; k < pairs / 8; ++k) {
      const float4 delta = four_columns(deltas, this->lane(), k);
      const float4 low = *this->weights_at(slot, 2 * k), high = *this->weights_at(slot, 2 * k + 1);
      const float weights[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float gradients[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float upstream = upstream_[8 * k + e];
        if constexpr (Base::modified) {
          upstream *= signbit(weights[e]) ? 0.0f : kept;
        }
        const float weight = Base::modified ? fabsf(weights[e]) : weights[e];
        gradients[e] = weight * (upstream - of_column(delta, e));
        gradients[e] = edge && weight == 0.0f ? 0.0f : gradients[e];
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        score_gradients_[4 * k + x] = ptx::packed_pair<Half>(gradients[2 * x], gradients[2 * x + 1]);
      }
    }
  }

  float sums_[tile.head_dim / 2];  // dK
  float upstream_[pairs];          // dP
  std::uint32_t score_gradients_[pairs / 2];
};

template <class Memory>
__device__ __forceinline__ void init_key_gradients_barriers(Memory& memory) {
  constexpr int threads = 128;  // of a consumer
  init_barrier(memory.keys_full, 1);
  init_barrier(memory.keys_empty, 2 * threads);
  for (int slot = 0; slot < Memory::stages; ++slot) {
    init_barrier(memory.queries_full[slot], 1);
    init_barrier(memory.queries_empty[slot], 2 * threads + guard_threads);
    init_barrier(memory.grad_outs_full[slot], 1);
    init_barrier(memory.grad_outs_empty[slot], 2 * threads);
    init_barrier(memory.grad_outs_checked[slot], guard_warps);
    init_barrier(memory.queries_checked[slot], guard_warps);
    init_barrier(memory.weights_full[slot], threads);
    init_barrier(memory.weights_empty[slot], threads);
    init_barrier(memory.post_full[slot], 1);
    init_barrier(memory.post_empty[slot], 2 * threads);
  }
  ptx::barrier_init_fence();
}

template <class Half, HopperBackwardVariant variant>
__global__ __launch_bounds__(HopperBackwardTile::threads,
                             1) void hopper_key_gradients(const __grid_constant__ HopperBackwardArguments args) {
  using Memory = KeyGradientsMemory<variant>;
  extern __shared__ __align__(tile_alignment) std::uint8_t dynamic_shared[];
  auto& memory = *reinterpret_cast<Memory*>(dynamic_shared);
  ptx::let_next_kernel_start();  // hopper_query_gradients, which reads nothing of this one's, or what waits for its end
  const auto feed = [&](int warp, int lane) {
    if (warp == 0 && lane == 0) {
      KeyGradientsProducer<Memory>(args, memory).run();
    } else if (warp >= 2) {
      BackwardGuard<Half, Memory>(memory, warp - 2, lane).run();
    }
  };
  const auto consume = [&](int which, int warp, int lane) {
    if (which == 0) {
      ScoreConsumer<Half, variant>(args, memory, warp, lane).run();
    } else {
      GradientConsumer<Half, variant>(args, memory, warp, lane).run();
    }
  };
  part_block<HopperBackwardTile::producer_registers, HopperBackwardTile::consumer_registers>(
      [&] { init_key_gradients_barriers(memory); }, feed, consume);
}

}  // namespace headway::cuda
