// A consumer of the Hopper forward kernel: a warpgroup that owns 64 query rows of a tile, from their first scores to
// the stored output. hopper_forward.cuh says how it works together with the others.
#pragma once

#include "engines/cuda/kernels/hopper_consumer_parts.cuh"

namespace headway::cuda {

template <class Half, int head_dim, HopperVariant variant>
class HopperConsumer : private ConsumerParts<Half, head_dim, variant> {
  using Base = ConsumerParts<Half, head_dim, variant>;
  using Base::address;
  using Base::args_;
  using Base::begun_;
  using Base::block_;
  using Base::blocks_;
  using Base::careful_;
  using Base::draw_kept;
  using Base::drops;
  using Base::finish;
  using Base::finish_values;
  using Base::group_;
  using Base::hand_over;
  using Base::keys_;
  using Base::lane_;
  using Base::load_mask_bits;
  using Base::load_span_bits;
  using Base::masked;
  using Base::memory_;
  using Base::modified;
  using Base::multiply_keys;
  using Base::multiply_values;
  using Base::out_;
  using Base::pack_weights;
  using Base::pass_last_block;
  using Base::poisoned_;
  using Base::post_;
  using Base::posted;
  using Base::queries_;
  using Base::query_;
  using Base::release;
  using Base::scores_;
  using Base::skip_blocks;
  using Base::skipped_;
  using Base::slope_;
  using Base::softmax_;
  using Base::spanned;
  using Base::tile;
  using Base::tile_row_;
  using Base::values_;
  using Base::values_are_edge_;
  using Base::wait_for_block;
  using Base::wait_for_query;
  using Base::wait_for_turn;
  using Base::wait_for_values;
  using Base::weights_;
  using typename Base::Memory;
  using typename Base::Position;

  // While a tile ends the next one's first scores are found, if its queries can be there by then. (Where tiles are
  // posted, waiting for the next post costs more than that wins.)
  static constexpr bool begins_early = !posted && (tile.query_in_registers || tile.query_slots > 1);

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    if (group_ == tile.consumers - 1) {
      hand_over();
    }
    if constexpr (posted) {
      run_posted();
    } else {
      run_plain();
    }
  }

 private:
  __device__ __forceinline__ void run_plain() {
#pragma unroll 1
    for (int index = blockIdx.x; index < args_.tiles; index += gridDim.x) {
      const HopperWork work = plain_work<tile.rows(), tile.keys>(args_, index);
      attend(work, group_ * 64 < work.stored_rows, [&] {
        const int next = index + static_cast<int>(gridDim.x);
        return next < args_.tiles && group_ * 64 < plain_work<tile.rows(), tile.keys>(args_, next).stored_rows;
      });
    }
  }

  __device__ __forceinline__ void run_posted() {
#pragma unroll 1
    while (true) {
      ptx::barrier_wait(address(offsetof(Memory, post_full), post_.slot), post_.parity);
      const auto& post = memory_.posts[post_.slot];
      const int kind = __shfl_sync(~0u, static_cast<int>(post.kind), 0);
      if (kind == static_cast<int>(PostKind::finished)) {
        return;
      }
      if (kind == static_cast<int>(PostKind::tile)) {
        attend(post.work, __shfl_sync(~0u, post.consumer_last[group_], 0) > 0, [] { return false; });
      }
      ptx::barrier_arrive(address(offsetof(Memory, post_empty), post_.slot));
      post_.advance();
    }
  }

  // One tile, of which this consumer's rows see a key or not. Its first scores may be there already (begun_); those of
  // the next tile are begun early if next_can_begin().
  template <class NextCanBegin>
  __device__ __forceinline__ void attend(const HopperWork& work, bool seeing, const NextCanBegin& next_can_begin) {
    blocks_ = posted ? work.blocks.uniform() : work.blocks;
    softmax_.start();
    poisoned_ = 0;
    careful_ = posted && __shfl_sync(~0u, work.careful, 0);
    if (careful_ && tile_row_ == 0) {
      release(offsetof(Memory, careful_begun));
    }
    if constexpr (modified) {
      slope_ = args_.slopes.data != nullptr ? args_.slope_factor * load_per_head(args_.slopes, work.head) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < head_dim / 2; ++i) {
      out_[i] = 0.0f;
    }
    if (!begins_early || !begun_) {
      wait_for_query();
      skip_blocks(seeing);
      if (!seeing) {
        pass_last_block();
        release(offsetof(Memory, query_empty), queries_.slot);
        queries_.advance();
        finish(work);
        return;
      }
      draw_kept(work, blocks_.last - 1);
      begin_tile();
      ptx::wgmma_wait<0>();
      ptx::touch(scores_);
    }
    first_block(work);
    later_blocks(work);
    if constexpr (!tile.query_in_registers) {
      release(offsetof(Memory, query_empty), queries_.slot);
    }
    queries_.advance();
    begun_ = begins_early && next_can_begin();
    if (begins_early && begun_) {
      last_values<true>(work);
    } else {
      last_values<false>(work);
    }
  }

  __device__ __forceinline__ void later_blocks(const HopperWork& work) {
    if constexpr (drops) {
      const bool alone =
          args_.cap == 0.0f && args_.slopes.data == nullptr && !args_.multiply && !args_.masks_anywhere();
      if (alone) {
        walk<Change::none>(work);
      } else {
        walk<Change::any, Edge::perhaps>(work);
      }
    } else if constexpr (masked) {
      const bool has_bias = args_.bias.data != nullptr;
      const bool alone = args_.cap == 0.0f && args_.slopes.data == nullptr;
      const bool products = alone && !has_bias && !args_.multiply;  // are scores, but for the mask
      if (products) {
        walk<Change::mask>(work);
      } else if (alone && has_bias && args_.bias.dtype == dtype_of<Half>) {
        walk<Change::bias>(work);
      } else {
        walk<Change::any, Edge::perhaps>(work);
      }
    } else if constexpr (modified) {
      // What padding and other sequences of a pack hold must not choose how the cap is applied to a warp's rows.
      const bool real = __shfl_sync(~0u, 64 * (group_ + 1) <= work.real_rows, 0);
      if (args_.folds_cap && args_.slopes.data == nullptr && real) {
        walk<Change::softcap>(work);
      } else if (args_.slopes.data != nullptr && args_.cap == 0.0f && !args_.multiply) {
        walk<Change::alibi>(work);
      } else {
        walk<Change::any, Edge::perhaps>(work);
      }
    } else if constexpr (spanned) {
      walk_spans(work);
    } else {
      walk<Change::none>(work);
    }
  }

  // The blocks after the first, by steps: which they are the producer says.
  __device__ __forceinline__ void walk_spans(const HopperWork& work) {
    const auto edge_comes = [&] {
      wait_for_block();
      return block_.edge;
    };
    int n = blocks_.last - 2;
#pragma unroll 1
    while (n >= 0) {
#pragma unroll 1
      for (; n >= 0 && edge_comes(); --n) {
        step<Edge::yes, Change::none>(work, n);
      }
#pragma unroll 1
      for (; n >= 0 && !edge_comes(); --n) {
        step<Edge::no, Change::none>(work, n);
      }
    }
  }

  // The blocks after the first, in which full ones have a loop of their own. Only the last block of a plain tile can be
  // an edge, and that has been the first.
  template <Change change, Edge full = Edge::no>
  __device__ __forceinline__ void walk(const HopperWork& work) {
    int n = blocks_.last - 2;
    if constexpr (posted && full == Edge::no) {
#pragma unroll 1
      while (n >= blocks_.first) {
#pragma unroll 1
        for (; n >= blocks_.first && blocks_.is_edge(n); --n) {
          step<Edge::yes, change>(work, n);
        }
#pragma unroll 1
        for (; n >= max(blocks_.first, blocks_.full_first); --n) {
          step<Edge::no, change>(work, n);
        }
      }
    } else {
#pragma unroll 1
      for (; n >= blocks_.first; --n) {
        step<full, change>(work, n);
      }
    }
  }

  // The scores of a tile's first block are on their way. Its queries are there.
  __device__ __forceinline__ void begin_tile() {
    if constexpr (tile.query_in_registers) {
      const int row = tile_row_ - lane_ / 4 + (lane_ & 15);
      const std::uint32_t shared = address(offsetof(Memory, query)) + row * 128;
#pragma unroll
      for (int k = 0; k < head_dim / 16; ++k) {
        const int chunk = 2 * (k % 4) + lane_ / 16;
        ptx::load_matrices(shared + k / 4 * tile.rows() * 128 + ((chunk ^ (row & 7)) << 4), query_[k]);
      }
      __syncwarp();
      release(offsetof(Memory, query_empty), queries_.slot);
    }
    wait_for_block();
    ptx::wgmma_fence();
    multiply_keys();
  }

  __device__ __forceinline__ void first_block(const HopperWork& work) {
    release(offsetof(Memory, empty), keys_.slot);
    // The next blocks in the ring are keys and then values; after a skip the values before them have been let go of.
    keys_.advance(skipped_ ? 2 : 1);
    values_ = keys_;
    values_.advance();
    skipped_ = false;
    values_are_edge_ = spanned && block_.edge;
    this->template modify<Edge::perhaps, modified ? Change::any : Change::none>(work, blocks_.last - 1);
    constexpr Change change = modified ? Change::any : Change::none;
    float older[2] = {softmax_.raise(scores_, 0, this->template rest<change>(0)),
                      softmax_.raise(scores_, 1, this->template rest<change>(1))};
    float bases[2] = {softmax_.base(0, this->template rest<change>(0)),
                      softmax_.base(1, this->template rest<change>(1))};
    softmax_.bases_in_log2(scores_, bases);
    softmax_.exponentials(scores_, 0, older[0], bases[0]);
    softmax_.exponentials(scores_, 1, older[1], bases[1]);
    pack_weights();
    draw_kept(work, blocks_.last - 2);
  }

  // Scores of block n, output of block n + 1, softmax of block n.
  template <Edge edge, Change change>
  __device__ __forceinline__ void step(const HopperWork& work, int n) {
    if constexpr (!spanned) {
      wait_for_block();
    }
    wait_for_turn();
    ptx::touch(out_);
    ptx::touch(weights_);
    ptx::wgmma_fence();
    multiply_keys();
    wait_for_values(n + 1, values_);
    ptx::wgmma_fence();
    multiply_values(values_);
    if constexpr (tile.hand_over == HandOver::issued) {
      hand_over();
    }
    if constexpr (change == Change::mask) {
      load_mask_bits();
    }
    if constexpr (spanned) {
      values_are_edge_ = block_.edge;
      if constexpr (edge == Edge::yes) {
        load_span_bits(work);
      }
    }
    ptx::wgmma_wait<1>();
    ptx::touch(scores_);
    if constexpr (tile.hand_over == HandOver::scored) {
      hand_over();
    }
    release(offsetof(Memory, empty), keys_.slot);
    keys_.advance(2);
    if constexpr (edge == Edge::no && change == Change::softcap) {
      finish_capped_step(work, n);
      return;
    }
    this->template modify<edge, change>(work, n);
    float older[2] = {softmax_.raise(scores_, 0, this->template rest<change>(0)),
                      softmax_.raise(scores_, 1, this->template rest<change>(1))};
    float bases[2] = {softmax_.base(0, this->template rest<change>(0)),
                      softmax_.base(1, this->template rest<change>(1))};
    softmax_.bases_in_log2(scores_, bases);
    if constexpr (tile.pinned_maximum) {
      ptx::pin(softmax_.reference[0] + softmax_.reference[1], address(offsetof(Memory, never_written)));
      finish_values();
      if (change == Change::alibi && args_.never) {  // else the exponentials move away from the work beside them
        return;
      }
    }
    softmax_.exponentials(scores_, 0, older[0], bases[0]);
    softmax_.exponentials(scores_, 1, older[1], bases[1]);
    if constexpr (!tile.pinned_maximum) {
      finish_values();
    }
    pack_weights();
    rescale_rows(out_, older);
    draw_kept(work, n - 1);  // which the next step needs, while its scores' registers are free
  }

  // The softmax of a block whose scores are still products. While they are small their scores lie so near to each other
  // that the rows' references can stay where they are: there is no maximum to be found and no older sum to be
  // multiplied (f16 has no room for that).
  __device__ __forceinline__ void finish_capped_step(const HopperWork& work, int n) {
    constexpr bool may_stay = std::is_same_v<Half, bfloat16>;
    const float largest = largest_magnitude(scores_);
    const bool stays = !may_stay || fminf(softmax_.reference[0], softmax_.reference[1]) >= args_.lowest_reference;
    with_cap_range(args_, largest, stays && largest <= args_.small_product, [&](auto range) {
      constexpr bool raises = !may_stay || range() != CapRange::small;
      float older[2] = {1.0f, 1.0f}, bases[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (raises) {
          older[i] = softmax_.raise_to(capped<range()>(args_, highest_score(scores_, i)), i);
        }
        bases[i] = softmax_.base(i, NoRest{}) - softmax_.shift;
      }
      if constexpr (tile.pinned_maximum) {
        finish_values();
      }
      this->template weigh_capped<range()>(0, older[0], bases[0]);
      this->template weigh_capped<range()>(1, older[1], bases[1]);
      if constexpr (!tile.pinned_maximum) {
        finish_values();
      }
      pack_weights();
      if constexpr (raises) {
        rescale_rows(out_, older);
      }
    });
  }

  // The output of the last block, and the end of the tile; the next one's first scores may be found meanwhile.
  template <bool begins_next>
  __device__ __forceinline__ void last_values(const HopperWork& work) {
    wait_for_values(blocks_.first, keys_);
    ptx::touch(out_);
    ptx::touch(weights_);
    ptx::wgmma_fence();
    multiply_values(keys_);
    const std::uint32_t slot = keys_.slot;
    keys_.advance();
    softmax_.join_quad(args_.natural_scale);
    if constexpr (begins_next) {
      wait_for_query();
      begin_tile();
    }
    ptx::wgmma_wait<begins_next ? 1 : 0>();
    ptx::touch(out_);
    release(offsetof(Memory, empty), slot);
    finish(work);
    if constexpr (begins_next) {
      ptx::wgmma_wait<0>();
      ptx::touch(scores_);
    }
  }
};

}  // namespace headway::cuda
