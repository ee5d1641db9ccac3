// What the weights say, computed where they are: a block takes a chunk of a head's rows, 64 at a time, and walks over
// their keys twice. The first walk leaves the softmax of each row; the second turns every tile of scores into weights
// p = exp(s - highest) / total, in registers, and takes from them
//   - what belongs to a row, in registers: entropy, distance, near; over a tile in Real, over tiles in f64;
//   - what belongs to a key or a cell, from the tile in shared memory: sums down the columns of each piece of a cell,
//     in place, then along the columns of a cell; they join f64 sums in global memory that only this block has;
//   - the largest weights of a row: a warp reads the row's tile again, if any of it is above the row's last one.
// Most tiles of a long sequence are simple: of these, what belongs to keys and cells comes from registers too
// (simple_tiles.cuh).
// Every sum is made in one fixed order by one owner, so the bits repeat; the chunks depend on the shape alone. (Atomics
// add to sums in global memory, because nobody waits for those; no two threads meet there.)
//
// Q is read once, K twice a tile of queries, mostly from L2; of a pair nothing else reaches global memory. A pair costs
// two products, two exponentials and about thirty instructions, which bound it.
#pragma once

#include "engines/cuda/kernels/analysis_rows.cuh"

namespace headway::cuda {

template <class Walk>
class TileAnalysis : AnalysisRows<Walk> {
 public:
  using Base = AnalysisRows<Walk>;
  using Real = typename Walk::Real;
  using Scores = typename Walk::Scores;
  using Base::block_threads, Base::shared_bytes;

  __device__ TileAnalysis(const AnalysisArguments& args, unsigned char* shared) : Base(args, shared) {}

  __device__ void analyze_tile(std::int64_t head, std::int64_t chunk, std::int64_t tile) {
    const std::int64_t b = (args_.first_head + head) / args_.heads;
    this->start_tile(b, head, chunk, tile);
    const std::int64_t begin = larger(range_.begin, args_.key_begin), end = smaller(range_.end, args_.key_end);
    // An empty walk too waits for the queries that were copied.
    const std::int64_t aligned = begin < end ? args_.key_begin + (begin - args_.key_begin) / keys * keys : end;
    if constexpr (Walk::walks_whole_tiles) {
      if (args_.part == AnalysisPart::softmax_of_edges) {
        this->walk_edges_for_softmax();
        this->store_softmax();
        return;
      }
      if (args_.part == AnalysisPart::edges && this->left_out() == 0) {
        analyze_edges(b, aligned, end);
        return;
      }
    }
    if (args_.given_lse.data == nullptr || __syncthreads_or(this->has_doubtful_row(b, aligned, end)) != 0) {
      this->walk_for_softmax(Stage::weights);
    }
    this->begin_rows(b);
    take_tiles(aligned, end);
    this->end_rows();
  }

 private:
  using Base::args_, Base::range_, Base::rows_, Base::tile_;
  using Base::keys, Base::own_rows, Base::rows, Base::slots, Base::stride, Base::threads;
  using Base::place, Base::tile_rows, Base::top_rows;
  using typename Base::TopRow;

  // The tiles that are not simple, after those that are.
  __device__ void analyze_edges(std::int64_t b, std::int64_t begin, std::int64_t end) {
    this->load_softmax(false);
    this->begin_rows(b);
    this->load_row_sums();
    if (args_.top > 0 && static_cast<int>(threadIdx.x) < tile_rows()) {
      top_rows()[threadIdx.x].least = this->list_of(static_cast<int>(threadIdx.x)).weights[args_.top - 1];
    }
    take_tiles(end, end);  // waits for the queries, and for the lists
#pragma unroll 1
    for (std::int64_t key = begin; key < end;) {
      std::int64_t next = key, simple_end = end;
#pragma unroll 1
      while (next < end && (simple_end = this->simple_end(next, end)) == next) {
        next += keys;
      }
      if (key < next) {
        take_tiles(key, smaller(next, end));
      }
      key = larger(next, simple_end);
    }
    this->end_rows();
  }

  __device__ void take_tiles(std::int64_t begin, std::int64_t end) {
    this->walk(Stage::weights, begin, end, [&](std::int64_t key, Scores& scores) { take(key, scores); });
  }

  // One tile of scores, from registers to everything that is asked for.
  __device__ void take(std::int64_t key, Scores& scores) {
    const int width = static_cast<int>(smaller(keys, args_.key_end - key));
    Real weights[slots];
    this->to_weights(key, width, scores, weights);
    const bool above = mark_raised(weights);
    __syncthreads();  // nobody needs the scratch any more
    this->store_tile(weights, tile_, stride);
    const bool any_above = __syncthreads_or(above) != 0;
    if (args_.first != nullptr && static_cast<int>(threadIdx.x) < tile_rows()) {
      pick_single_weights(key, width);
    }
    if (any_above) {
      raise_top(key, width);
    }
    if (args_.weights != nullptr) {
      store_weights(key, width);
    }
    if (args_.received != nullptr || args_.cell_sums != nullptr) {
      __syncthreads();  // single weights have been read
      sum_columns();
      __syncthreads();
      add_received(key, width);
      add_cells(key, width);
    }
  }

  __device__ bool has_ties() const { return args_.part == AnalysisPart::edges; }

  // Marks the rows that have one of these weights among their largest; whether there is one.
  __device__ bool mark_raised(const Real (&weights)[slots]) {
    bool above = false;
    if (args_.top > 0) {
#pragma unroll
      for (int m = 0; m < own_rows; ++m) {
        TopRow& list = top_rows()[this->row_of(m)];
        bool raised = false;
#pragma unroll
        for (int slot = 0; slot < slots; ++slot) {
          raised = raised || (Walk::own_row(slot) == m && this->is_above(weights[slot], list.least, has_ties()));
        }
        if (raised) {
          list.raised = above = true;
        }
      }
    }
    return above;
  }

  // One thread a row.
  __device__ void pick_single_weights(std::int64_t key, int width) {
    const int r = static_cast<int>(threadIdx.x);
    if (key == 0) {
      static_cast<Real*>(args_.first)[place().result + r] = tile_[r * stride];
    }
    const std::int64_t own = place().position + r - key;
    if (own >= 0 && own < width) {
      static_cast<Real*>(args_.diagonal)[place().result + r] = tile_[r * stride + static_cast<int>(own)];
    }
  }

  // The warps share the rows that have something to list.
  __device__ void raise_top(std::int64_t key, int width) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (int r = warp; r < tile_rows(); r += threads / 32) {
      if (top_rows()[r].raised) {
        this->raise_row(tile_ + r * stride, r, key, width, has_ties(), this->list_of(r));
      }
    }
  }

  __device__ void store_weights(std::int64_t key, int width) {
    const std::int64_t result_keys = args_.key_end - args_.key_begin;
    const std::int64_t first_row = place().head * (args_.row_end - args_.row_begin) + place().pieces.tile * rows;
    Real* target = static_cast<Real*>(args_.weights) + first_row * result_keys + key - args_.key_begin;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x); at < tile_rows() * keys; at += threads) {
      const int r = at / keys, c = at % keys;
      if (c < width) {
        target[r * result_keys + c] = tile_[r * stride + c];
      }
    }
  }

  struct Gathered {
    Real sum, highest;
  };

  // Of places [begin, end): the sum of values, in four stripes, and the highest of what `highest_at` says.
  template <class HighestAt>
  __device__ static Gathered gathered(const Real* values, int step, int begin, int end, const HighestAt& highest_at) {
    Real sums[4] = {}, highest = 0;
    const auto add = [&](Real& sum, int at) {
      const Real value = values[at * step], other = highest_at(at, value);
      sum += value;
      highest = other > highest ? other : highest;
    };
    int at = begin;
#pragma unroll 2
    for (; at + 4 <= end; at += 4) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        add(sums[x], at + x);
      }
    }
#pragma unroll 1
    for (; at < end; ++at) {
      add(sums[0], at);
    }
    return {(sums[0] + sums[1]) + (sums[2] + sums[3]), highest};
  }

  // Of each piece: the sums down its columns, in its first row, and the largest weights in its second. A piece of one
  // row is both already.
  __device__ void sum_columns() {
    const TilePieces& pieces = place().pieces;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x); at < pieces.count * keys; at += threads) {
      const int piece = at / keys, begin = pieces.begin(piece), end = pieces.end(piece);
      if (end - begin > 1) {
        Real* column = tile_ + at % keys;
        const Gathered found = gathered(column, stride, begin, end, [](int, Real value) { return value; });
        column[begin * stride] = found.sum;
        column[(begin + 1) * stride] = found.highest;
      }
    }
  }

  __device__ void add_received(std::int64_t key, int width) {
    const TilePieces& pieces = place().pieces;
    const int c = static_cast<int>(threadIdx.x);
    if (args_.received == nullptr || c >= width) {
      return;
    }
    double sum = 0;
#pragma unroll 1
    for (int piece = 0; piece < pieces.count; ++piece) {
      sum += tile_[pieces.begin(piece) * stride + c];
    }
    ptx::add_to(place().targets.received[key + c], sum);
  }

  // Begins with the threads that have nothing to add to what keys received.
  __device__ void add_cells(std::int64_t key, int width) {
    if (args_.cell_sums == nullptr) {
      return;
    }
    const TilePieces& pieces = place().pieces;
    const std::int64_t before = key - args_.key_begin;  // keys of the rectangle
    const std::int64_t first_cell = before / args_.key_cell;
    const int cells = static_cast<int>((before + width - 1) / args_.key_cell - first_cell) + 1;
#pragma unroll 1
    for (int at = (static_cast<int>(threadIdx.x) + threads / 2) % threads; at < pieces.count * cells; at += threads) {
      const int piece = at / cells;
      const std::int64_t cell = first_cell + at % cells;
      const int begin = static_cast<int>(larger(cell * args_.key_cell - before, 0));
      const int end = static_cast<int>(smaller((cell + 1) * args_.key_cell - before, width));
      const int row = pieces.begin(piece);
      const Real* sums = tile_ + row * stride;
      const Real* largest = sums + (pieces.end(piece) - row > 1 ? stride : 0);
      const Gathered found = gathered(sums, 1, begin, end, [&](int c, Real) { return largest[c]; });
      const std::int64_t target = piece * args_.columns + cell;
      ptx::add_to(place().targets.cell_sums[target], found.sum);
      ptx::raise_to(place().targets.cell_highest[target], found.highest);
    }
  }
};

// Chunks of the rows of the launch's heads. A head's last ones have the most keys when it is causal: they begin first.
template <class Analysis>
__device__ inline void analyze_chunks(const AnalysisArguments& arguments, unsigned char* shared) {
  Analysis analysis(arguments, shared);
  const std::int64_t tasks = arguments.head_count * arguments.chunks;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t chunk = arguments.chunks - 1 - task / arguments.head_count;
    const std::int64_t end = smaller((chunk + 1) * arguments.chunk_tiles, arguments.tiles);
#pragma unroll 1
    for (std::int64_t tile = chunk * arguments.chunk_tiles; tile < end; ++tile) {
      analysis.analyze_tile(task % arguments.head_count, chunk, tile);
    }
  }
}

template <class Analysis>
Launch analysis_launch(const char* name, void (*kernel)(AnalysisArguments), const AnalysisArguments& arguments) {
  Launch launch;
  launch.name = name;
  launch.kernel = reinterpret_cast<const void*>(kernel);
  launch.threads = Analysis::block_threads;
  launch.shared_bytes = Analysis::shared_bytes(arguments.head_dim);
  launch.tasks = arguments.head_count * arguments.chunks;
  return launch;
}

}  // namespace headway::cuda
