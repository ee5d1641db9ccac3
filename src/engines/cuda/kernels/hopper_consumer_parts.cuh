// What a consumer of the Hopper forward kernel is made of: its registers, its products, what happens to scores on their
// way to weights, and its side of the barriers. hopper_consumer.cuh says in which order.
#pragma once

#include "engines/cuda/kernels/hopper_finish.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"
#include "engines/cuda/kernels/hopper_modifiers.cuh"
#include "engines/cuda/kernels/hopper_repair.cuh"
#include "engines/cuda/kernels/hopper_spans.cuh"
#include "engines/cuda/kernels/hopper_units.cuh"
#include "engines/cuda/ptx/wgmma.cuh"

namespace headway::cuda {

// Whether a block is an edge, as far as the compiler is told: a mask in the loop costs time even where it is jumped
// over.
enum class Edge : std::uint8_t { no, yes, perhaps };

// Which changes to scores a loop is compiled for. Those that a call may combine are `any`; a loop for a single one is
// shorter, and its code lies together.
enum class Change : std::uint8_t { none, any, softcap, alibi, mask, bias };

template <class Half, int head_dim, HopperVariant variant>
class ConsumerParts {
 public:
  using Memory = HopperMemory<head_dim, variant>;
  static constexpr HopperTile tile = Memory::tile;
  static constexpr bool posted = !is_plain(variant);
  static constexpr bool masked = is_masked(variant);
  static constexpr bool drops = variant == HopperVariant::dropped;
  static constexpr bool spanned = Memory::spanned;
  static constexpr bool modified = masked || variant == HopperVariant::modified;

  __device__ __forceinline__ ConsumerParts(const HopperArguments& args, Memory& memory, int group, int warp, int lane)
      : args_(args),
        memory_(memory),
        base_(ptx::kept(ptx::shared_address(&memory))),
        next_turn_(ptx::kept(group + 1 == tile.consumers ? 1 : 2 + group)),
        group_(group),
        lane_(static_cast<int>(ptx::kept(lane))),
        quad_lane_(lane & 3) {
    tile_row_ = group * 64 + warp * 16 + lane / 4;
    softmax_.unit = args.softmax_unit;
    softmax_.coarse = args.coarse_score;
    query_descriptor_ = ptx::tile_descriptor(ptx::shared_address(memory.query[0]) + group * 64 * 128, 16);
    const std::uint32_t ring = ptx::shared_address(memory.ring);
    key_descriptor_ = ptx::tile_descriptor(ring, 16);
    value_descriptor_ = ptx::tile_descriptor(ring, tile.keys * 128);
  }

 protected:
  using Position = RingPosition<tile.slots>;

  // ---- Products ----

  // S = Q K^T  [64, keys]
  __device__ __forceinline__ void multiply_keys() {
    using Product = ptx::Wgmma<Half, tile.keys>;
    const std::uint64_t keys = key_descriptor_ + keys_.slot * (tile.block_bytes() >> 4);
    const std::uint64_t queries = query_descriptor_ + queries_.slot * (tile.query_bytes() >> 4);
#pragma unroll
    for (int k = 0; k < head_dim / 16; ++k) {
      const std::uint64_t b = keys + k / 4 * (tile.keys * 128 >> 4) + k % 4 * 2;
      if constexpr (tile.query_in_registers) {
        Product::template multiply<ptx::Reduced::along_columns>(scores_, query_[k][0], query_[k][1], query_[k][2],
                                                                query_[k][3], b, k != 0);
      } else {
        Product::multiply(scores_, queries + k / 4 * (tile.rows() * 128 >> 4) + k % 4 * 2, b, k != 0);
      }
    }
    ptx::wgmma_commit();
  }

  // O += P V  [64, head_dim]
  __device__ __forceinline__ void multiply_values(Position position) {
    const std::uint64_t values = value_descriptor_ + position.slot * (tile.block_bytes() >> 4);
#pragma unroll
    for (int k = 0; k < tile.keys / 16; ++k) {
      ptx::Wgmma<Half, head_dim>::template multiply<ptx::Reduced::along_rows>(
          out_, weights_[4 * k], weights_[4 * k + 1], weights_[4 * k + 2], weights_[4 * k + 3], values + k * 128, 1);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void finish_values() {
    ptx::wgmma_wait<0>();
    ptx::touch(out_);
    ptx::touch(scores_);
    release(offsetof(Memory, empty), values_.slot);
    values_.advance(2);
  }

  // ---- Scores and weights ----

  __device__ __forceinline__ UnitView unit_view() const {
    const int slot = unit_slot(args_.units, group_, unit_);
    return {address(offsetof(Memory, units)) + slot * args_.units.bytes, (tile_row_ - lane_ / 4) % unit_rows, lane_,
            args_.units.one_row};
  }

  template <Change change>
  __device__ __forceinline__ void add_bias() {
    wait_for_unit();
    const float scale = change == Change::any && args_.cap != 0.0f ? 1.0f : args_.unit;
    if (change == Change::bias) {
      add_half_bias<Half>(unit_view(), scale, scores_);
    } else if (args_.bias.dtype == DType::f32) {
      add_f32_bias(unit_view(), scale, scores_);
    } else if (args_.bias.dtype == DType::bf16) {
      add_half_bias<bfloat16>(unit_view(), scale, scores_);
    } else {
      add_half_bias<float16>(unit_view(), scale, scores_);
    }
  }

  // The mask's bits of a block, before its scores are there.
  __device__ __forceinline__ void load_mask_bits() {
    wait_for_unit();
    load_mask<tile.keys>(unit_view(), mask_bits_);
    release_unit();
  }

  // Products become scores, in the order of the definition.
  template <Change change>
  __device__ __forceinline__ void modify_scores(const HopperWork& work, int n) {
    constexpr bool any = change == Change::any;
    const bool biased = change == Change::bias || (any && masked && args_.bias.data != nullptr);
    if (change == Change::softcap) {
      cap_scores(args_, scores_);
    } else if (any && (!biased || args_.cap != 0.0f)) {  // else the bias is added to the scaled product in one step
      scale_scores(args_, scores_);
    }
    if constexpr (masked) {
      if (biased) {
        add_bias<change>();
      }
    }
    if (change == Change::alibi || (any && args_.slopes.data != nullptr)) {
      add_alibi(slope_, !(fabsf(slope_) < args_.coarse_slope), work, tile_row_, n * tile.keys + 2 * quad_lane_, scores_,
                rest_);
    }
    if constexpr (masked) {
      if (biased) {
        release_unit();
      } else if (change == Change::mask || has_units()) {
        if constexpr (change != Change::mask) {
          load_mask_bits();
        }
        apply_mask(mask_bits_, scores_);
      }
    }
  }

  // What row i's scores of the block have in common and is not in them yet.
  template <Change change>
  __device__ __forceinline__ auto rest(int i) const {
    if constexpr (change == Change::alibi || change == Change::any) {
      return rest_[i];
    } else {
      return NoRest{};
    }
  }

  // The columns that spans leave, before their scores are there.
  __device__ __forceinline__ void load_span_bits(const HopperWork& work) {
    const int first_key = block_.number * tile.keys, column = first_key + 2 * quad_lane_;
    const auto& post = memory_.posts[post_.slot];
    const ColumnRange ranges[2] = {{post.begin[tile_row_] - column, post.end[tile_row_] - column},
                                   {post.begin[tile_row_ + 8] - column, post.end[tile_row_ + 8] - column}};
    find_span_bits<tile.keys / 4>(args_.spans, work, tile_row_, first_key, quad_lane_, ranges, mask_bits_);
  }

  template <Edge edge, Change change>
  __device__ __forceinline__ void modify(const HopperWork& work, int n) {
    if constexpr (spanned) {
      if (edge == Edge::yes || (edge == Edge::perhaps && block_.edge)) {
        if constexpr (edge == Edge::perhaps) {
          load_span_bits(work);
        }
        apply_span_bits(mask_bits_, scores_);
      }
      return;
    }
    const int column = n * tile.keys + 2 * quad_lane_;
    if constexpr (change != Change::none) {
      modify_scores<change>(work, n);
    }
    if (edge == Edge::yes || (edge == Edge::perhaps && blocks_.is_edge(n))) {
      ColumnRange rows[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (posted) {
          rows[i] = {memory_.posts[post_.slot].begin[tile_row_ + 8 * i] - column,
                     memory_.posts[post_.slot].end[tile_row_ + 8 * i] - column};
        } else {
          rows[i] = {INT_MIN, work.key_count - column};
        }
      }
      mask_columns(scores_, rows);
    }
  }

  // Row i's products become weights: their exponents apply the cap.
  template <CapRange range>
  __device__ __forceinline__ void weigh_capped(int i, float older, float base) {
    softmax_.exponentials(scores_, i, older, [&](float product) {
      if constexpr (range == CapRange::small) {
        return fmaf(product, cap_factor(args_.small_factors, product), -base);
      } else {
        return capped<range>(args_, product) - base;
      }
    });
  }

  // Which weights of block n dropout keeps, if there is such a block.
  __device__ __forceinline__ void draw_kept(const HopperWork& work, int n) {
    if constexpr (drops) {
      if (n >= blocks_.first) {
        kept_.template draw<2>(args_.dropout, work.batch, work.head, work.row + tile_row_, n * tile.keys, quad_lane_);
      }
    }
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int k = 0; k < tile.keys / 4; ++k) {
      weights_[k] = ptx::packed_pair<Half>(scores_[2 * k], scores_[2 * k + 1]);
      if constexpr (drops) {
        weights_[k] &= kept_.halves(k);
      }
    }
  }

  // ---- The end of a tile ----

  __device__ __forceinline__ void finish(const HopperWork& work) {
    bool finite;
    if constexpr (Memory::splits) {
      finite = store_partial(args_, work, tile_row_, quad_lane_, softmax_, out_);
    } else {
      finite = store_rows<Half, variant>(args_, work, tile_row_, quad_lane_, softmax_, out_);
    }
    if constexpr (posted) {
      if (!careful_ && !finite) {
        memory_.posts[post_.slot].again = true;
      }
      if (poisoned_ != 0) {
        if constexpr (spanned) {
          repair_spans<Half, tile.keys>(args_, memory_.posts[post_.slot], memory_.spans.works[post_.slot],
                                        tile_row_ - lane_ / 4, lane_);
        } else {
          repair<Half, Memory::splits>(args_, memory_.posts[post_.slot], tile_row_ - lane_ / 4, tile.keys, lane_);
        }
      }
    }
  }

  // ---- Blocks that this consumer's rows do not see ----

  // Passes over the blocks from which this consumer's rows see no key (others' rows do): lets go of them and of its
  // turns, in the order in which the others use them. One is left.
  __device__ __forceinline__ void skip_blocks(bool seeing) {
    int own_last = blocks_.last;
    if constexpr (posted) {
      own_last = max(__shfl_sync(~0u, memory_.posts[post_.slot].consumer_last[group_], 0), blocks_.first + 1);
    } else if (!seeing) {
      own_last = blocks_.first + 1;
    }
    const int skipped = blocks_.last - own_last;
    if (skipped == 0) {
      return;
    }
    values_ = keys_;
    values_.advance(2);
#pragma unroll 1
    for (int k = 0; k < skipped; ++k) {
      pass_keys();
      keys_.advance(k == 0 ? 1 : 2);
      pass_unit();
      wait_for_turn();
      hand_over();
      pass_values(blocks_.last - 1 - k, values_);
      values_.advance(2);
    }
    blocks_.last = own_last;
    skipped_ = true;
  }

  // The one that is left, where the rows see no key at all.
  __device__ __forceinline__ void pass_last_block() {
    pass_keys();
    keys_.advance(skipped_ ? 2 : 1);
    skipped_ = false;
    pass_unit();
    pass_values(blocks_.first, keys_);
    keys_.advance();
  }

  __device__ __forceinline__ void pass_keys() {
    if constexpr (spanned) {
      wait_for_block();
      values_are_edge_ = block_.edge;
    }
    pass_over(keys_);
  }

  __device__ __forceinline__ void pass_over(Position position) {
    ptx::barrier_wait(address(offsetof(Memory, full), position.slot), position.parity);
    release(offsetof(Memory, empty), position.slot);
  }

  __device__ __forceinline__ void pass_values(int n, Position position) {
    if (posted && (spanned ? careful_ && values_are_edge_ : is_checked(args_, careful_, blocks_, n))) {
      wait_for_check(position);
    }
    pass_over(position);
  }

  __device__ __forceinline__ void pass_unit() {
    if (has_units()) {
      wait_for_unit();
      release_unit();
    }
  }

  // ---- Barriers ----

  __device__ __forceinline__ void release(std::size_t offset, std::uint32_t index = 0) {
    if (lane_ == 0) {
      ptx::barrier_arrive(address(offset, index));
    }
  }

  __device__ __forceinline__ void wait_for_query() {
    ptx::barrier_wait(address(offsetof(Memory, query_full), queries_.slot), queries_.parity);
  }

  // The next block's keys, and which block it is. Lane 0 lets go of the slot.
  __device__ __forceinline__ void wait_for_block() {
    ptx::barrier_wait(address(offsetof(Memory, full), keys_.slot), keys_.parity);
    if constexpr (spanned) {
      const int packed = lane_ == 0 ? memory_.spans.blocks[keys_.slot] : 0;
      block_ = SpanBlock::unpacked(__shfl_sync(~0u, packed, 0));
    }
  }

  // The guard's barriers have phases of their own: few blocks are checked.
  __device__ __forceinline__ void wait_for_check(Position position) {
    ptx::barrier_wait(address(offsetof(Memory, checked), position.slot), checked_parities_ >> position.slot & 1);
    checked_parities_ ^= 1u << position.slot;
  }

  __device__ __forceinline__ void wait_for_values(int n, Position position) {
    if constexpr (posted) {
      if (spanned ? careful_ && values_are_edge_ : is_checked(args_, careful_, blocks_, n)) {
        wait_for_check(position);
        const int* found = memory_.guard_found[position.slot];
        poisoned_ |= __shfl_sync(~0u, lane_ == 0 ? found[0] | found[1] : 0, 0);  // lane 0 lets go of the slot
        return;
      }
    }
    ptx::barrier_wait(address(offsetof(Memory, full), position.slot), position.parity);
  }

  __device__ __forceinline__ bool has_units() const { return masked && (!drops || args_.masks_anywhere()); }

  __device__ __forceinline__ void wait_for_unit() {
    const std::size_t barrier = args_.units.prepared ? offsetof(Memory, unit_ready) : offsetof(Memory, unit_full);
    ptx::barrier_wait(address(barrier, unit_slot(args_.units, group_, unit_)), unit_.parity);
  }

  __device__ __forceinline__ void release_unit() {
    ptx::barrier_arrive(address(offsetof(Memory, unit_empty), unit_slot(args_.units, group_, unit_)));
    unit_.advance(args_.units.each);
  }

  __device__ __forceinline__ void wait_for_turn() {
    if constexpr (tile.hand_over != HandOver::never) {
      ptx::named_barrier_sync(1 + group_, 256);
    }
  }

  __device__ __forceinline__ void hand_over() {
    if constexpr (tile.hand_over != HandOver::never) {
      ptx::named_barrier_arrive(static_cast<int>(next_turn_), 256);
    }
  }

  // A field's address in shared memory, or that of a barrier in an array; from a base that is kept, since to find it
  // takes a slow instruction.
  __device__ __forceinline__ std::uint32_t address(std::size_t offset, std::uint32_t index = 0) const {
    return base_ + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(sizeof(std::uint64_t));
  }

  const HopperArguments& args_;
  Memory& memory_;
  const std::uint32_t base_;       // of memory_
  const std::uint32_t next_turn_;  // the named barrier of the warpgroup that issues after this one
  const int group_;                // which consumer
  const int lane_;                 // of the warp
  const int quad_lane_;            // of the four lanes that share a row
  int tile_row_;                   // this thread's first row in the tile; its second is 8 further
  std::uint64_t query_descriptor_, key_descriptor_, value_descriptor_;

  std::uint32_t query_[tile.query_in_registers ? head_dim / 16 : 1][4];
  float scores_[tile.keys / 2];
  std::uint32_t weights_[tile.keys / 4];
  float out_[head_dim / 2];
  TileSoftmax<Half> softmax_;
  float slope_;
  float rest_[2] = {0.0f, 0.0f};
  std::uint32_t mask_bits_[2];
  KeptWeights<tile.keys / 2> kept_;

  HopperBlocks blocks_;
  Position keys_, values_;
  RingPosition<tile.query_slots> queries_;
  PostPosition post_;
  UnitPosition unit_;
  bool begun_ = false;    // the tile's first scores are there
  bool skipped_ = false;  // the tile's first blocks have been passed over
  bool careful_ = false;
  std::uint32_t checked_parities_ = 0;  // by slot of the ring
  int poisoned_ = 0;                    // a value that is not finite was taken out of an edge block
  SpanBlock block_;                     // of the scores at hand, where rows have spans
  bool values_are_edge_ = false;        // those that come next
};

}  // namespace headway::cuda
