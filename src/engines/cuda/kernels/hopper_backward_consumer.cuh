// A consumer of the Hopper backward: 64 keys, and all that is multiplied with them (hopper_backward.cuh says what).
#pragma once

#include "engines/cuda/kernels/hopper_backward_single.cuh"
#include "engines/cuda/kernels/hopper_backward_span_pairs.cuh"
#include "engines/cuda/ptx/tma.cuh"
#include "engines/cuda/ptx/wgmma.cuh"

namespace headway::cuda {

template <class Half, int columns, HopperBackwardVariant variant>
class HopperBackwardConsumer {
 public:
  using Memory = HopperBackwardMemory<columns, variant>;
  static constexpr HopperBackwardTile tile = Memory::tile;
  static constexpr bool masked = variant == HopperBackwardVariant::masked;
  static constexpr bool modified = masked || variant == HopperBackwardVariant::modified;
  static constexpr int queries = tile.queries;
  static constexpr int pairs = queries / 2;  // that a thread holds
  using Single = SingleModifier<Half, pairs, variant>;
  static constexpr bool single = Single::exists, ranged = !single && !modified;
  static constexpr bool spanned = variant == HopperBackwardVariant::spanned;  // ranged too
  // dP begins when P is there, because masks and biases need its registers.
  static constexpr bool late_gradients = masked;
  // Where in a step the next one's modifier is loaded: as early as registers and shared memory allow, when weights are
  // made or on either side of the consumers' barrier.
  enum class Ahead : std::uint8_t { never, weights, barrier, behind_barrier };
  static constexpr Ahead ahead = !Single::loads_ahead             ? Ahead::never
                                 : columns == 64 && queries == 64 ? Ahead::weights
                                 : Single::stages                 ? Ahead::behind_barrier
                                                                  : Ahead::barrier;
  // Queries are worked on in parts of 32, so that the products of one run while the next is computed.
  static constexpr int part_blocks = 2, parts = queries / 16 / part_blocks;
  // Whose lse is read ahead of the products, and whose weights are made while dP runs.
  static constexpr int parts_ahead = masked ? 0 : modified || Single::caps ? 1 : 2;

  __device__ __forceinline__ HopperBackwardConsumer(const HopperBackwardArguments& args, Memory& memory, int group,
                                                    int warp, int lane)
      : args_(args), memory_(memory), shared_(memory), group_(group), thread_(group * 128 + warp * 32 + lane) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (std::uint32_t tiles = 0;; ++tiles) {
      const std::uint32_t slot = tiles & 1;
      ptx::barrier_wait(shared_.of(offsetof(Memory, post_full), slot), tiles >> 1 & 1);
      if (memory_.posts[slot].finished) {
        return;
      }
      differentiate(memory_.posts[slot]);
      release(offsetof(Memory, post_empty), slot);
    }
  }

 private:
  using Modifiers = ScoreModifiers<pairs, masked ? pairs : 1>;
  using Score = ptx::Wgmma<Half, queries>;
  using Gradient = ptx::Wgmma<Half, columns>;
  using QueryGradient = ptx::Wgmma<Half, tile.split_columns()>;

  __device__ __forceinline__ void differentiate(const BackwardPost& post) {
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) {
      key_sums_[i] = 0.0f;
      value_sums_[i] = 0.0f;
    }
    if (__shfl_sync(~0u, post.steps, 0) > 0) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, keys_full)), post.keys_parity);
      bool last = false;
#pragma unroll 1
      while (!last) {
        last = step(post);
      }
      release(offsetof(Memory, keys_empty));
      if constexpr (!tile.hands_over_at_once) {
        ptx::shared_writes_to_async_fence();
        release_gradients(~steps_ & 1);
      }
    }
    store(post);
  }

  // True for the last one of a key tile. What follows from the thread and the step is found again each time: to keep
  // it would take registers that the sums need.
  //
  // Whatever reads shared memory behind products in the queue waits until they have begun. So barriers are looked at
  // and rows' numbers read ahead of them.
  __device__ __forceinline__ bool step(const BackwardPost& post) {
    thread_ = static_cast<int>(ptx::kept(thread_));
    steps_ = ptx::kept(steps_);
    const std::uint32_t slot = steps_ & 1, parity = steps_ >> 1 & 1;
    const std::uint32_t group = group_;
    const std::uint32_t grad_outs_full = shared_.of(offsetof(Memory, grad_outs_full), slot);
    const bool grad_outs_there = ptx::barrier_is_over(grad_outs_full, parity);
    ptx::barrier_wait(shared_.of(offsetof(Memory, queries_full), slot), parity);
    const int flags = __shfl_sync(~0u, memory_.steps[slot].flags, 0);
    const bool edge = Memory::edges_everywhere || (flags & BackwardStep::edge) != 0;
    WarpTile own;
    if constexpr (single) {
      own = own_tile(post, slot);
    }
    if constexpr (Single::loads_ahead) {
      if ((flags & BackwardStep::first) != 0) {
        single_.load(args_, post, own);
      }
    }
    float4 lse[masked ? 1 : parts_ahead * part_blocks];
#pragma unroll
    for (int k = 0; k < parts_ahead * part_blocks; ++k) {
      lse[k] = four_columns(lse_at(slot), lane(), k);
    }
    ptx::wgmma_fence();
    multiply_scores(shared_.of(offsetof(Memory, keys)), queries_at(slot), group, scores_);
    if constexpr (single) {
      single_.prepare(args_, post, own, (flags & BackwardStep::cut) != 0, allowed_);
    }
    if constexpr (spanned) {
      if (edge) {
        find_allowed(args_, post.sequence, own_pairs(post, slot), lane(), allowed_);
      }
    }
    if (!grad_outs_there) {
      ptx::barrier_wait(grad_outs_full, parity);
    }
    if constexpr (!late_gradients) {
      multiply_weights(slot, group);
    }
    Modifiers modifiers;
    if constexpr (modified) {
      find_modifiers<masked>(args_, post, own_pairs(post, slot), edge, lane(), modifiers);
    }
    ptx::wgmma_wait<late_gradients ? 0 : 1>();
    ptx::touch(scores_);
    if constexpr (single) {
      single_.look(args_, scores_);
    }
    if (ranged && edge) {
      const auto lse_of_rows = [&](int k) { return lse_of(slot, lse, k); };
      if constexpr (spanned) {
        forbid_products(args_, allowed_, lse_of_rows, scores_);
      } else {
        forbid_products(args_, post.sequence, own_pairs(post, slot), lse_of_rows, scores_);
      }
    }
    if (edge) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, grad_outs_checked), slot), parity);
    }
    const bool last = (flags & BackwardStep::last) != 0;
    work_in_parts(post, slot, group, edge, last, lse, modifiers);
    if (ranged && edge) {
      forbid_score_gradients(post, slot);
    }
    ptx::shared_writes_to_async_fence();
    if constexpr (!tile.hands_over_at_once) {
      // The fence was for the last step's query gradients too.
      release_gradients(slot ^ 1, (flags & BackwardStep::first) == 0);
    }
    if (edge) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, queries_checked), slot), parity);
    }
    load_ahead<Ahead::barrier>(post, last);
    sum_over_pairs(post, slot, parity, group, last);
    ++steps_;
    return last;
  }

  // What the next step's modifier has in memory, if this is where it is loaded: in any case ahead of the sums'
  // products, behind which it would wait for them. A bias that takes the place of score gradients comes when both
  // consumers are done with the last ones there.
  template <Ahead here>
  __device__ __forceinline__ void load_ahead(const BackwardPost& post, bool last) {
    if constexpr (here == ahead) {
      if (!last) {
        const std::uint32_t next = steps_ + 1, slot = next & 1;
        ptx::barrier_wait(shared_.of(offsetof(Memory, queries_full), slot), next >> 1 & 1);
        single_.load(args_, post, own_tile(post, slot));
      }
    }
  }

  // P and dS, and with them dV: from S, while dP runs. `lse` is of the parts ahead.
  template <int blocks>
  __device__ __forceinline__ void work_in_parts(const BackwardPost& post, std::uint32_t slot, std::uint32_t group,
                                                bool edge, bool last, const float4 (&lse)[blocks],
                                                Modifiers& modifiers) {
    const auto weigh = [&](int part) {
      if constexpr (modified) {
        in_part<8 * part_blocks>(part, scores_, [&](auto& own) { scale_scores(args_, own); });
      } else if constexpr (Single::caps) {
        in_part<8 * part_blocks>(part, scores_, [&](auto& own) { single_.cap(args_, own); });
      }
#pragma unroll
      for (int k = part * part_blocks; k < (part + 1) * part_blocks; ++k) {
        if constexpr (single) {
          single_.weigh(args_, own_tile(post, slot), lse_of(slot, lse, k), k, scores_, weights_, allowed_);
        } else if constexpr (modified) {
          make_modified_weights<Half>(args_, modifiers, lse_of(slot, lse, k), k, scores_, weights_);
        } else {
          make_weights(args_, lse_of(slot, lse, k), edge ? lowest_lse : NAN, k, scores_);
        }
      }
    };
#pragma unroll
    for (int part = 0; part < (late_gradients ? parts : parts_ahead); ++part) {
      weigh(part);
    }
    if constexpr (late_gradients) {
      multiply_weights(slot, group);
      ptx::wgmma_wait<0>();
      ptx::touch(weight_gradients_);
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      float4 delta[part_blocks];
#pragma unroll
      for (int k = 0; k < part_blocks; ++k) {
        delta[k] = four_columns(delta_at(slot), lane(), part * part_blocks + k);
      }
      if constexpr (!modified && !Single::caps) {
        pack_part(part);
      }
      if constexpr (single) {
        forbid_pairs<4 * part_blocks>(4 * part_blocks * part, weights_);
      }
      if constexpr (Single::drops) {
        single_.kept.template cut<4 * part_blocks>(4 * part_blocks * part, weights_);
      }
      add_value_gradients(slot, part);
      if constexpr (!late_gradients) {
        if (part == 0) {
          ptx::wgmma_wait<1>();
          ptx::touch(weight_gradients_);
          load_ahead<Ahead::weights>(post, last);
        }
        if (part + parts_ahead < parts) {
          weigh(part + parts_ahead);
        }
      }
      make_score_gradients(slot, edge, modifiers.kept, delta, part);
    }
  }

  // dQ and dK, from dS of both consumers. dQ goes out while dK is made.
  __device__ __forceinline__ void sum_over_pairs(const BackwardPost& post, std::uint32_t slot, std::uint32_t parity,
                                                 std::uint32_t group, bool last) {
    ptx::named_barrier_sync(1, 256);
    load_ahead<Ahead::behind_barrier>(post, last);
    ptx::touch(key_sums_);
    ptx::wgmma_fence();
    float query_gradients[tile.gradient_numbers() / 256];
    multiply_query_gradients(slot, group, query_gradients);
    add_key_gradients(slot, group);
    ptx::barrier_wait(shared_.of(offsetof(Memory, gradients_empty), slot), parity ^ 1);
    ptx::wgmma_wait<1>();
    ptx::touch(query_gradients);
    release(offsetof(Memory, grad_outs_empty), slot);
    store_query_gradients(slot, query_gradients);
    if constexpr (tile.hands_over_at_once) {
      ptx::shared_writes_to_async_fence();
      release_gradients(slot);
    }
    ptx::wgmma_wait<0>();
    ptx::touch(key_sums_);
    ptx::touch(value_sums_);
    release(offsetof(Memory, queries_empty), slot);
  }

  __device__ __forceinline__ std::uint32_t queries_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, queries), slot, tile.query_bytes());
  }
  __device__ __forceinline__ std::uint32_t grad_outs_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, grad_outs), slot, tile.query_bytes());
  }
  __device__ __forceinline__ std::uint32_t score_gradients_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, score_gradients), slot, tile.score_bytes());
  }

  __device__ __forceinline__ std::uint32_t lse_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, lse), slot, queries * 4);
  }

  __device__ __forceinline__ std::uint32_t delta_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, delta), slot, queries * 4);
  }

  // Of 16 rows, of which those of the parts ahead have been read.
  template <int blocks>
  __device__ __forceinline__ float4 lse_of(std::uint32_t slot, const float4 (&read)[blocks], int k) const {
    return k < parts_ahead * part_blocks ? read[k] : four_columns(lse_at(slot), lane(), k);
  }

  // ---- Products ----

  // Rows of keys (or values), 64 for each consumer, with all rows of queries (or output gradients).
  __device__ __forceinline__ void multiply_scores(std::uint32_t own, std::uint32_t other, std::uint32_t group,
                                                  float (&products)[pairs]) {
    const std::uint64_t a = ptx::tile_descriptor(own + group * 64 * 128, 16), b = ptx::tile_descriptor(other, 16);
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) {
      Score::multiply(products, a + k / 4 * (backward_keys * 8) + k % 4 * 2, b + k / 4 * (queries * 8) + k % 4 * 2,
                      k != 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_weights(std::uint32_t slot, std::uint32_t group) {
    ptx::wgmma_fence();
    multiply_scores(shared_.of(offsetof(Memory, values)), grad_outs_at(slot), group, weight_gradients_);
  }

  // Of a part of the queries.
  __device__ __forceinline__ void add_value_gradients(std::uint32_t slot, int part) {
    const std::uint64_t b = ptx::tile_descriptor(grad_outs_at(slot), queries * 128);
    if (part == 0) {
      ptx::touch(value_sums_);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int k = part * part_blocks; k < (part + 1) * part_blocks; ++k) {
      Gradient::template multiply<ptx::Reduced::along_rows>(value_sums_, weights_[4 * k], weights_[4 * k + 1],
                                                            weights_[4 * k + 2], weights_[4 * k + 3], b + k * 128, 1);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void add_key_gradients(std::uint32_t slot, std::uint32_t group) {
    const std::uint64_t b = ptx::tile_descriptor(queries_at(slot), queries * 128);
    if constexpr (tile.keeps_score_gradients) {
#pragma unroll
      for (int k = 0; k < queries / 16; ++k) {
        Gradient::template multiply<ptx::Reduced::along_rows>(key_sums_, score_gradients_[4 * k],
                                                              score_gradients_[4 * k + 1], score_gradients_[4 * k + 2],
                                                              score_gradients_[4 * k + 3], b + k * 128, 1);
      }
    } else {
      const std::uint64_t a = ptx::tile_descriptor(score_gradients_at(slot) + group * 64 * 128, 16);
#pragma unroll
      for (int k = 0; k < queries / 16; ++k) {
        Gradient::template multiply<ptx::Reduced::along_columns, ptx::Reduced::along_rows>(
            key_sums_, a + k / 4 * (backward_keys * 8) + k % 4 * 2, b + k * 128, 1);
      }
    }
    ptx::wgmma_commit();
  }

  // Over all 128 keys: this consumer's columns, or its queries.
  __device__ __forceinline__ void multiply_query_gradients(std::uint32_t slot, std::uint32_t group,
                                                           float (&gradients)[tile.gradient_numbers() / 256]) {
    constexpr std::uint32_t panel = backward_keys * 128;
    // A panel has 64 columns; of head dim 64 each consumer has half of one.
    const std::uint32_t own = columns == 64 ? group * 64 : group * panel;
    const std::uint64_t a =
        ptx::tile_descriptor(score_gradients_at(slot) + (tile.split_by_columns() ? 0 : group * panel), 16);
    const std::uint64_t b =
        ptx::tile_descriptor(shared_.of(offsetof(Memory, keys)) + (tile.split_by_columns() ? own : 0), 16);
#pragma unroll
    for (int k = 0; k < backward_keys / 16; ++k) {
      QueryGradient::template multiply<ptx::Reduced::along_rows, ptx::Reduced::along_rows>(gradients, a + k * 128,
                                                                                           b + k * 128, k != 0);
    }
    ptx::wgmma_commit();
  }

  // ---- Scores, weights and their gradients ----

  __device__ __forceinline__ BackwardPairs own_pairs(const BackwardPost& post, std::uint32_t slot) const {
    return {post.batch, memory_.steps[slot].head, post.key_tile * backward_keys + thread_ / 32 * 16 + lane() / 4,
            memory_.steps[slot].row + 2 * (lane() & 3)};
  }

  __device__ __forceinline__ WarpTile own_tile(const BackwardPost& post, std::uint32_t slot) const {
    const std::uint32_t room =
        Memory::has_bias ? shared_.of(offsetof(Memory, bias), slot, tile.score_bytes()) : score_gradients_at(slot);
    return {own_pairs(post, slot), room, thread_ / 32 * 16, lane()};
  }

  // Rounded, for dV.
  __device__ __forceinline__ void pack_part(int part) {
#pragma unroll
    for (int k = part * part_blocks; k < (part + 1) * part_blocks; ++k) {
      pack_weights<Half>(k, scores_, weights_);
    }
  }

  // dS = P (dP - delta) of a part, rounded, to shared memory as [keys][queries]. Each 16 queries are stored while the
  // next ones are computed.
  __device__ __forceinline__ void make_score_gradients(std::uint32_t slot, bool edge, const AllowedPairs<pairs>& kept,
                                                       const float4 (&delta)[part_blocks], int part) {
#pragma unroll
    for (int k = part * part_blocks; k < (part + 1) * part_blocks; ++k) {
      float gradients[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float weight = scores_[8 * k + e];
        float upstream = weight_gradients_[8 * k + e];
        const float own_delta = of_column(delta[k % part_blocks], e);
        if constexpr (Single::drops) {
          gradients[e] = weight * fmaf(upstream, single_.kept.or_zero(8 * k + e, args_.kept), -own_delta);
        } else {
          if (modified && args_.dropout.active) {
            upstream *= kept.or_zero(8 * k + e, args_.kept);
          }
          gradients[e] = weight * (upstream - own_delta);
        }
        if constexpr (modified) {
          gradients[e] = edge && weight == 0.0f ? 0.0f : gradients[e];
        }
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        score_gradients_[4 * k + x] = ptx::packed_pair<Half>(gradients[2 * x], gradients[2 * x + 1]);
      }
      if constexpr (single) {
        forbid_pairs<4>(4 * k, score_gradients_);
      }
      store_score_gradients(slot, k);
    }
  }

  // Packed pairs from the first on.
  template <int packed>
  __device__ __forceinline__ void forbid_pairs(int first, std::uint32_t (&values)[queries / 4]) const {
    if (!allowed_.all) {
      allowed_.template cut<packed>(first, values);
    }
  }

  // A forbidden pair's gradient is 0 whatever comes from upstream. Stored again: rather that than keep all the others
  // waiting.
  __device__ __forceinline__ void forbid_score_gradients(const BackwardPost& post, std::uint32_t slot) {
    if constexpr (spanned) {
      allowed_.template cut<pairs / 2>(0, score_gradients_);
    } else {
      for_range<pairs>(post.sequence, own_pairs(post, slot), [&](int e, bool forbidden) {
        score_gradients_[e / 2] &= forbidden ? (e % 2 == 0 ? 0xFFFF0000u : 0x0000FFFFu) : ~0u;
      });
    }
#pragma unroll
    for (int k = 0; k < queries / 16; ++k) {
      store_score_gradients(slot, k);
    }
  }

  __device__ __forceinline__ void store_score_gradients(std::uint32_t slot, int k) {
    const std::uint32_t packed[4] = {score_gradients_[4 * k], score_gradients_[4 * k + 1], score_gradients_[4 * k + 2],
                                     score_gradients_[4 * k + 3]};
    ptx::store_matrices(packed,
                        score_chunk(score_gradients_at(slot), thread_ / 32 * 16 + (lane() & 15), k, lane() / 16));
  }

  // ---- Results ----

  // As rows where they are whole; else in the order of the threads, which keeps the stores free of conflicts: see
  // hopper_backward_rows.cu.
  __device__ __forceinline__ void store_query_gradients(std::uint32_t slot,
                                                        const float (&gradients)[tile.gradient_numbers() / 256]) {
    if (args_.whole_query_gradients) {
      store_query_rows(slot, gradients);
      return;
    }
    constexpr int chunks = tile.gradient_numbers() / 1024;
    auto* to = reinterpret_cast<float4*>(memory_.query_gradients[slot]) + thread_ / 128 * chunks * 128 + thread_ % 128;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      to[c * 128] = {gradients[4 * c], gradients[4 * c + 1], gradients[4 * c + 2], gradients[4 * c + 3]};
    }
  }

  // Boxes of 64 columns, swizzled as their tensor map says.
  __device__ __forceinline__ void store_query_rows(std::uint32_t slot,
                                                   const float (&gradients)[tile.gradient_numbers() / 256]) {
    const float scale = static_cast<float>(args_.scale);
    const int group = thread_ / 128;
    const int row = thread_ % 128 / 32 * 16 + (lane() & 15) + (tile.split_by_columns() ? 0 : group * 64);
    const int first = tile.split_by_columns() ? group * tile.split_columns() : 0;  // column
    const std::uint32_t box = shared_.of(offsetof(Memory, query_gradients), slot, tile.gradient_numbers() * 4) +
                              first / 64 * (queries * 128) + row * 128;
#pragma unroll
    for (int k = 0; k < tile.split_columns() / 16; ++k) {
      std::uint32_t packed[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        packed[x] = ptx::packed_pair<Half>(gradients[8 * k + 2 * x] * scale, gradients[8 * k + 2 * x + 1] * scale);
      }
      const int chunk = first % 64 / 8 + 2 * k + lane() / 16;
      ptx::store_matrices(packed, box + ((chunk ^ (row & 7)) << 4));
    }
  }

  __device__ __forceinline__ void store(const BackwardPost& post) {
    const float scale = static_cast<float>(args_.scale);
    const float kept = modified || Single::drops ? args_.kept : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = post.key_tile * backward_keys + thread_ / 32 * 16 + lane() / 4 + 8 * r;
      const bool stored = key < post.key_count;
      if (args_.parts > 1) {
        store_parts(post, key, stored, r, scale, kept);
        continue;
      }
      const std::int64_t position = post.key_begin + key;
      if (args_.key_gradient.data != nullptr) {
        Half* row = static_cast<Half*>(args_.key_gradient.data) +
                    row_offset(args_.key_gradient, post.batch, post.kv_head, position);
        store_row(row, key_sums_, r, scale, lane() & 3, static_cast<int>(args_.head_dim), stored, false);
      }
      if (args_.value_gradient.data != nullptr) {
        Half* row = static_cast<Half*>(args_.value_gradient.data) +
                    row_offset(args_.value_gradient, post.batch, post.kv_head, position);
        store_row(row, value_sums_, r, kept, lane() & 3, static_cast<int>(args_.value_dim), stored, false);
      }
    }
  }

  // One of the two rows, of a team that has a part of the query heads.
  __device__ __forceinline__ void store_parts(const BackwardPost& post, int key, bool stored, int r, float scale,
                                              float kept) {
    const std::int64_t row = (post.batch * args_.kv_heads + post.kv_head) * args_.key_len + key;
    if (stored && args_.key_gradient.data != nullptr) {
      store_part(args_.key_parts + row * args_.head_dim, key_sums_, r, scale, lane() & 3,
                 static_cast<int>(args_.head_dim));
    }
    if (stored && args_.value_gradient.data != nullptr) {
      store_part(args_.value_parts + row * args_.value_dim, value_sums_, r, kept, lane() & 3,
                 static_cast<int>(args_.value_dim));
    }
  }

  // ---- Barriers ----

  __device__ __forceinline__ int lane() const { return thread_ & 31; }

  // By every thread: each has read or written for itself.
  __device__ __forceinline__ void release(std::size_t offset, std::uint32_t index = 0) {
    ptx::barrier_arrive(shared_.of(offset, index));
  }

  __device__ __forceinline__ void release_gradients(std::uint32_t slot, bool there = true) {
    __syncwarp();
    if (lane() == 0 && there) {
      ptx::barrier_arrive(shared_.of(offsetof(Memory, gradients_full), slot));
    }
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  const std::uint32_t group_;  // which consumer
  int thread_;                 // of both consumers
  float key_sums_[columns / 2], value_sums_[columns / 2];
  float scores_[pairs], weight_gradients_[pairs];
  std::uint32_t weights_[queries / 4];
  std::uint32_t score_gradients_[queries / 4];
  Single single_;
  AllowedPairs<pairs> allowed_;  // of a single modifier, or of spans at an edge
  std::uint32_t steps_ = 0;      // so far
};

}  // namespace headway::cuda
