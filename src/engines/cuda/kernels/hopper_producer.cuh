// The producer: one thread that keeps the query tile and the ring of key and value blocks full.
#pragma once

#include "engines/cuda/kernels/hopper_schedule.cuh"
#include "engines/cuda/kernels/hopper_units.cuh"
#include "engines/cuda/kernels/page_entry.cuh"
#include "engines/cuda/ptx/tma.cuh"

namespace headway::cuda {

template <int head_dim, HopperVariant variant>
class HopperProducer {
 public:
  using Memory = HopperMemory<head_dim, variant>;
  static constexpr HopperTile tile = Memory::tile;

  __device__ __forceinline__ HopperProducer(const HopperArguments& args, Memory& memory)
      : args_(args), memory_(memory), group_(static_cast<int>(args.group)) {}

  __device__ __forceinline__ void run() {
    if constexpr (is_plain(variant)) {
      run_plain();
    } else {
      run_posted();
    }
  }

 private:
  __device__ __forceinline__ void run_plain() {
#pragma unroll 1
    for (int index = blockIdx.x; index < args_.tiles; index += gridDim.x) {
      load_tile(plain_work<tile.rows(), tile.keys>(args_, index));
    }
  }

  __device__ __forceinline__ void run_posted() {
    PostPosition post;
#pragma unroll 1
    while (true) {
      ptx::barrier_wait(ptx::shared_address(&memory_.post_full[post.slot]), post.parity);
      const PostKind kind = memory_.posts[post.slot].kind;
      if (kind == PostKind::finished) {
        return;
      }
      if (kind == PostKind::tile) {
        if constexpr (Memory::spanned) {
          load_spans(memory_.posts[post.slot].work, memory_.spans.works[post.slot]);
        } else {
          load_tile(memory_.posts[post.slot].work);
        }
      }
      ptx::barrier_arrive(ptx::shared_address(&memory_.post_empty[post.slot]));
      post.advance();
    }
  }

  // Q, K(n), K(n-1), V(n), K(n-2), V(n-1), ..., V(first): a block's values are needed one step after its keys. The mask
  // or bias of a block changes its scores while the values before are multiplied: it follows them.
  __device__ __forceinline__ void load_tile(const HopperWork& work) {
    load_query(work);
    const int last = work.blocks.last - 1;
    load_keys(work, last);
    load_units(work, last);
#pragma unroll 1
    for (int n = last; n > work.blocks.first; --n) {
      load_keys(work, n - 1);
      load_values(work, n);
      load_units(work, n - 1);
    }
    load_values(work, work.blocks.first);
  }

  // The same for the blocks that spans leave.
  __device__ __forceinline__ void load_spans(const HopperWork& work, const SpanWork& spans) {
    load_query(work);
    SpanBlocks<tile.keys> blocks(args_.spans, spans);
    SpanBlock block = blocks.next();
    load_keys(work, block);
#pragma unroll 1
    for (int n = work.blocks.last - 1; n > 0; --n) {
      const SpanBlock next = blocks.next();
      load_keys(work, next);
      load_values(work, block.number);
      block = next;
    }
    load_values(work, block.number);
  }

  // The consumers read the block's number when its keys are there.
  __device__ __forceinline__ void load_keys(const HopperWork& work, const SpanBlock& block) {
    ptx::barrier_wait(ptx::shared_address(&memory_.empty[position_.slot]), position_.parity ^ 1);
    memory_.spans.blocks[position_.slot] = block.packed();
    load_keys(work, block.number);
  }

  __device__ __forceinline__ void load_query(const HopperWork& work) {
    const std::uint32_t full = ptx::shared_address(&memory_.query_full[query_.slot]);
    ptx::barrier_wait(ptx::shared_address(&memory_.query_empty[query_.slot]), query_.parity ^ 1);
    ptx::barrier_expect_bytes(full, tile.query_bytes());
    copy_panels<tile.rows()>(memory_.query[query_.slot], &args_.query_map, work.query_begin + work.row,
                             work.head * args_.query_steps.head, work.batch * args_.query_steps.batch, full);
    query_.advance();
  }

  __device__ __forceinline__ void load_keys(const HopperWork& work, int n) {
    load_block(&args_.key_map, args_.key_steps, work, n);
  }

  __device__ __forceinline__ void load_values(const HopperWork& work, int n) {
    load_block(&args_.value_map, args_.value_steps, work, n);
  }

  __device__ __forceinline__ void load_units(const HopperWork& work, int n) {
    if (Memory::masked && args_.masks_anywhere() && args_.units.source != UnitSource::rows) {
      const UnitArguments& units = args_.units;
#pragma unroll 1
      for (int consumer = 0; consumer < tile.consumers; ++consumer) {
        const int slot = unit_slot(units, consumer, unit_);
        const std::uint32_t full = ptx::shared_address(&memory_.unit_full[slot]);
        ptx::barrier_wait(ptx::shared_address(&memory_.unit_empty[slot]), unit_.parity ^ 1);
        if (units.source == UnitSource::elements) {
          ptx::barrier_arrive(full);
          continue;
        }
        ptx::barrier_expect_bytes(full, units.boxes * units.box_bytes);
        const std::uint32_t shared = ptx::shared_address(memory_.units) + slot * units.bytes;
        const int row = units.one_row ? 0 : work.row + unit_rows * consumer;
#pragma unroll 1
        for (int box = 0; box < units.boxes; ++box) {
          ptx::copy_box(shared + box * unit_rows * box_row_bytes, &units.map,
                        {n * tile.keys + box * units.box_columns, row, work.head * units.steps.head,
                         work.batch * units.steps.batch},
                        full);
        }
      }
      unit_.advance(units.each);
    }
  }

  __device__ __forceinline__ void load_block(const CUtensorMap* map, MapSteps steps, const HopperWork& work, int n) {
    if constexpr (!is_plain(variant)) {
      if (args_.pages.table != nullptr) {
        load_paged_block(map, steps, work, n);
        return;
      }
    }
    const std::uint32_t full = open_slot();
    copy_panels<tile.keys>(memory_.ring[position_.slot], map, work.key_begin + n * tile.keys,
                           work.head / group_ * steps.head, work.batch * steps.batch, full);
    position_.advance();
  }

  // Waits for the next slot of the ring; the barrier that its copies report to.
  __device__ __forceinline__ std::uint32_t open_slot() {
    const std::uint32_t full = ptx::shared_address(&memory_.full[position_.slot]);
    ptx::barrier_wait(ptx::shared_address(&memory_.empty[position_.slot]), position_.parity ^ 1);
    ptx::barrier_expect_bytes(full, tile.block_bytes());
    return full;
  }

  // The same rows from pages, a few of one page at a time. The first pages are looked up together, before the wait for
  // the slot. Rows behind the last key are masked: any that there are.
  __device__ __forceinline__ void load_paged_block(const CUtensorMap* map, MapSteps steps, const HopperWork& work,
                                                   int n) {
    constexpr int together = 8;
    const PageEntries entries(args_.pages, work.batch);
    const int box_rows = args_.box_rows, first = n * tile.keys, head = work.head / group_ * steps.head;
    const int last = max(work.key_count - 1, 0) / box_rows * box_rows;
    int pages[together];
#pragma unroll
    for (int x = 0; x < together; ++x) {
      pages[x] = entries.load(min(first + x * box_rows, last));
    }
    const std::uint32_t full = open_slot(), shared = ptx::shared_address(memory_.ring[position_.slot]);
    const auto copy = [&](int row, int page) {
      const int slot = entries.slot_of(min(first + row, last));
#pragma unroll
      for (int panel = 0; panel < tile.panels(); ++panel) {
        ptx::copy_box(shared + (panel * tile.keys + row) * 128, map,
                      {panel * 64, slot, head, entries.inside(page) * steps.batch}, full);
      }
    };
#pragma unroll
    for (int x = 0; x < together; ++x) {
      if (x * box_rows < tile.keys) {
        copy(x * box_rows, pages[x]);
      }
    }
#pragma unroll 1
    for (int row = together * box_rows; row < tile.keys; row += box_rows) {
      copy(row, entries.load(min(first + row, last)));
    }
    position_.advance();
  }

  template <int rows>
  __device__ __forceinline__ void copy_panels(const std::uint8_t* destination, const CUtensorMap* map, int row,
                                              int head, int batch, std::uint32_t barrier) {
    const std::uint32_t shared = ptx::shared_address(destination);
#pragma unroll
    for (int panel = 0; panel < tile.panels(); ++panel) {
      ptx::copy_box(shared + panel * rows * 128, map, {panel * 64, row, head, batch}, barrier);
    }
  }

  const HopperArguments& args_;
  Memory& memory_;
  const int group_;  // query heads that share a key head
  RingPosition<tile.slots> position_;
  UnitPosition unit_;  // the same for every consumer
  RingPosition<tile.query_slots> query_;
};

}  // namespace headway::cuda
