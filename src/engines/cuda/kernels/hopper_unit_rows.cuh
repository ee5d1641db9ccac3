// Units of a mask or bias (hopper_units.cuh) whose rows the copy engine cannot read: their length, or where they begin,
// is no multiple of 16 bytes. The guard's two warps copy them word by word, asynchronously, each 32 rows of a unit: the
// lanes have neighbouring words of a row, which reads memory as it lies. A word holds parts of two columns where a row
// does not begin with one; so when the words are there each lane shifts one row into its place. Meanwhile the next unit
// is on its way.
#pragma once

#include "engines/cuda/kernels/hopper_units.cuh"
#include "engines/cuda/ptx/copy_async.cuh"
#include "engines/cuda/ptx/mbarrier.cuh"

namespace headway::cuda {

template <class Memory>
class UnitRows {
 public:
  __device__ __forceinline__ UnitRows(const HopperArguments& args, Memory& memory, int warp, int lane)
      : args_(args), memory_(memory), warp_(warp), lane_(lane) {}

  // Asks for this warp's rows of a unit, when its place is free, and finishes the one before.
  __device__ __forceinline__ void begin(const HopperWork& work, int block, int consumer, UnitPosition position) {
    const int slot = unit_slot(args_.units, consumer, position);
    const std::uint32_t empty = ptx::shared_address(&memory_.unit_empty[slot]);
    if (!__all_sync(~0u, ptx::barrier_is_over(empty, position.parity ^ 1))) {
      finish();  // somebody may wait for it before this place becomes free
    }
    ptx::barrier_wait(empty, position.parity ^ 1);
    const Source source(args_, work, block, consumer);
    copy(source, slot);
    ptx::commit_copies();
    const std::uintptr_t own = source.at(row());
    const std::uint32_t shift = (static_cast<std::uint32_t>(own) & 3) * 8;
    const std::uint32_t behind = shift != 0 && has_row() ? source.word_behind(own) : 0;
    if (slot_ >= 0) {
      ptx::wait_for_copies<1>();
      complete([](std::uint8_t*) {});
    }
    slot_ = slot;
    shift_ = shift;
    behind_ = behind;
  }

  // Makes what was asked for ready, if it is not. change(unit) may do something to this lane's row before.
  template <class Change>
  __device__ __forceinline__ void finish(const Change& change) {
    if (slot_ >= 0) {
      ptx::wait_for_copies<0>();
      complete(change);
    }
  }
  __device__ __forceinline__ void finish() {
    finish([](std::uint8_t*) {});
  }

 private:
  static constexpr HopperTile tile = Memory::tile;
  static constexpr int mask_row_bytes = tile.keys < box_row_bytes ? 64 : box_row_bytes;

  // The matrix' rows at a block of keys, as addresses.
  struct Source {
    std::uintptr_t first, end;  // of the unit's first row; of the matrix
    std::int64_t step;
    int last;   // of the rows that exist, counted in the unit
    int bytes;  // of a row of the unit

    __device__ __forceinline__ Source(const HopperArguments& args, const HopperWork& work, int block, int consumer) {
      const Matrix& matrix = args.bias.data != nullptr ? args.bias : args.mask;
      const int element = 4 / args.units.each;
      const int tile_row = min(unit_rows * consumer, work.stored_rows - 1);
      first =
          reinterpret_cast<std::uintptr_t>(matrix.data) + (work.batch * matrix.batch + work.head * matrix.head +
                                                           (work.row + tile_row) * matrix.query + block * tile.keys) *
                                                              element;
      end = reinterpret_cast<std::uintptr_t>(args.units.end);
      step = matrix.query * element;
      last = max(0, work.stored_rows - 1 - unit_rows * consumer);
      bytes = tile.keys * element;
    }

    __device__ __forceinline__ std::uintptr_t at(int row) const { return first + min(row, last) * step; }

    // All 64 rows exist, and all words that hold something of them belong to the matrix.
    __device__ __forceinline__ bool is_inside() const {
      const std::uintptr_t highest = first + (step > 0 ? (unit_rows - 1) * step : 0);
      return last >= unit_rows - 1 && highest + bytes + 4 <= end;
    }

    // How many of a word's bytes belong to the matrix.
    __device__ __forceinline__ int bytes_of_word(std::uintptr_t word) const {
      return word + 4 <= end ? 4 : word < end ? static_cast<int>(end - word) : 0;
    }

    // The word behind a row's other words, of which the row has the first bytes.
    __device__ __forceinline__ std::uint32_t word_behind(std::uintptr_t row) const {
      const std::uintptr_t word = (row & ~std::uintptr_t{3}) + bytes;
      const int there = bytes_of_word(word);
      if (there == 4) [[likely]] {
        return __ldg(reinterpret_cast<const std::uint32_t*>(word));
      }
      std::uint32_t result = 0;
      for (int k = 0; k < there; ++k) {
        result |= std::uint32_t{__ldg(reinterpret_cast<const std::uint8_t*>(word + k))} << (8 * k);
      }
      return result;
    }
  };

  // This lane's, counted in the unit.
  __device__ __forceinline__ int row() const { return 32 * warp_ + lane_; }
  __device__ __forceinline__ bool has_row() const { return !args_.units.one_row || row() == 0; }

  // Where a unit has a chunk of 16 bytes of a row.
  __device__ __forceinline__ std::uint32_t chunk_at(int slot, int row, int chunk) const {
    const std::uint32_t unit = ptx::shared_address(memory_.units) + slot * args_.units.bytes;
    if (mask_row_bytes < box_row_bytes && args_.units.each == 4) {
      return unit + chunk_offset<mask_row_bytes>(row, chunk);
    }
    return unit + chunk / 8 * unit_rows * box_row_bytes + chunk_offset<box_row_bytes>(row, chunk % 8);
  }

  // A row has 16 words or a multiple of 32: two rows, or a part of one, at a time.
  __device__ __forceinline__ void copy(const Source& source, int slot) {
    if (args_.units.one_row) {
      if (warp_ == 0 && lane_ < lanes(source)) {
        copy_words<false>(source, slot, 0, source.first);
      }
    } else if (source.is_inside()) {
      copy_rows<true>(source, slot);
    } else {
      copy_rows<false>(source, slot);
    }
  }

  // Lanes that have words of one row.
  __device__ __forceinline__ static int lanes(const Source& source) {
    return tile.keys >= 128 ? 32 : min(source.bytes / 4, 32);
  }

  // `inside`: all rows exist, and no word reaches beyond the matrix.
  template <bool inside>
  __device__ __forceinline__ void copy_rows(const Source& source, int slot) {
    const int together = 32 / lanes(source);
    const int first = 32 * warp_ + lane_ / lanes(source);
    std::uintptr_t row_at = source.first + first * source.step;
#pragma unroll 8
    for (int r = 0; r < 32 / together; ++r) {
      const int row = first + r * together;
      copy_words<inside>(source, slot, row, inside ? row_at : source.at(row));
      row_at += together * source.step;
    }
  }

  // This lane's words of a row: one in each of its one, two or four boxes.
  template <bool inside>
  __device__ __forceinline__ void copy_words(const Source& source, int slot, int row, std::uintptr_t row_at) {
    const int lane = lane_ % lanes(source);
    const std::uintptr_t from = (row_at & ~std::uintptr_t{3}) + 4 * lane;
    const std::uint32_t to = chunk_at(slot, row, lane / 4) + lane % 4 * 4;
    const auto copy_box = [&](int box) {
      const std::uintptr_t own = from + box * box_row_bytes;
      ptx::copy_word(to + box * unit_rows * box_row_bytes, reinterpret_cast<const void*>(own),
                     inside ? 4 : source.bytes_of_word(own));
    };
    copy_box(0);
    if (source.bytes > box_row_bytes) {
      copy_box(1);
    }
    if (source.bytes > 2 * box_row_bytes) {
      copy_box(2);
      copy_box(3);
    }
  }

  // The words of all lanes are there, or will be when each has waited for its own.
  template <class Change>
  __device__ __forceinline__ void complete(const Change& change) {
    __syncwarp();
    if (__any_sync(~0u, shift_ != 0) && has_row()) {
      shift_row();
    }
    change(memory_.units + slot_ * args_.units.bytes);
    ptx::barrier_arrive(ptx::shared_address(&memory_.unit_ready[slot_]));
    slot_ = -1;
  }

  __device__ __forceinline__ void shift_row() {
    const int chunks = tile.keys / args_.units.each / 4;
    uint4 now = ptx::load_chunk(chunk_at(slot_, row(), 0));
#pragma unroll 2
    for (int c = 0; c < chunks; ++c) {
      uint4 next{behind_, 0, 0, 0};
      if (c + 1 < chunks) {
        next = ptx::load_chunk(chunk_at(slot_, row(), c + 1));
      }
      ptx::store_chunk(chunk_at(slot_, row(), c),
                       {__funnelshift_r(now.x, now.y, shift_), __funnelshift_r(now.y, now.z, shift_),
                        __funnelshift_r(now.z, now.w, shift_), __funnelshift_r(now.w, next.x, shift_)});
      now = next;
    }
  }

  const HopperArguments& args_;
  Memory& memory_;
  const int warp_, lane_;
  int slot_ = -1;             // of the unit that is on its way; none
  std::uint32_t shift_ = 0;   // of this lane's row, in bits
  std::uint32_t behind_ = 0;  // the word behind this lane's row
};

}  // namespace headway::cuda
