// What the weights say, computed where they are: a block takes a chunk of a head's rows, 64 at a time, and walks over
// their keys twice. The first walk leaves the softmax of each row; the second turns every tile of scores into weights
// p = exp(s - highest) / total, in registers, and takes from them
//   - what belongs to a row, in registers: entropy, distance, near; over a tile in Real, over tiles in f64;
//   - what belongs to a key or a cell, from the tile in shared memory: sums down the columns of each piece of a cell,
//     in place, then along the columns of a cell; they join f64 sums in global memory that only this block has;
//   - the largest weights of a row: a warp reads the row's tile again, if any of it is above the row's last one.
// Every sum is made in one fixed order by one owner, so the bits repeat; the chunks depend on the shape alone.
//
// Q is read once, K twice a tile of queries, mostly from L2; of a pair nothing else reaches global memory. A pair costs
// two products, two exponentials and about thirty instructions, which bound it.
#pragma once

#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/analysis_pieces.h"
#include "engines/cuda/kernels/plain_rows.cuh"

namespace headway::cuda {

template <class Walk>
class TileAnalysis : Walk {
 public:
  using typename Walk::Real, typename Walk::Scores;
  static constexpr int rows = Walk::rows, keys = Walk::keys, threads = Walk::threads;
  static constexpr int slots = Walk::slots, own_rows = Walk::own_rows;
  static_assert(rows == analysis_rows && rows <= threads && keys <= threads);
  static constexpr int stride = keys + 8;  // of a row of weights in shared memory: pairs of 8 rows in all banks
  static constexpr int weights_bytes = rows * stride * static_cast<int>(sizeof(Real));

  static constexpr int tile_bytes = weights_bytes > Walk::scratch_bytes ? weights_bytes : Walk::scratch_bytes;
  static constexpr int row_sums = 3;  // of each row

  // The tile of weights lies where the walk has its scratch.
  __host__ __device__ static std::size_t shared_bytes(std::int64_t head_dim) {
    return Walk::walk_bytes(head_dim) - Walk::scratch_bytes + tile_bytes +
           row_sums * own_rows * threads * sizeof(double);
  }

  __device__ TileAnalysis(const AnalysisArguments& args, unsigned char* shared)
      : Walk(args, shared),
        args_(args),
        tile_(this->scratch_),
        sums_(reinterpret_cast<double*>(reinterpret_cast<unsigned char*>(tile_) + tile_bytes) + threadIdx.x) {}

  // A chunk of the rows of one of the launch's heads.
  __device__ void run(std::int64_t head, std::int64_t chunk) {
    const std::int64_t end = smaller((chunk + 1) * args_.chunk_tiles, args_.tiles);
#pragma unroll 1
    for (std::int64_t tile = chunk * args_.chunk_tiles; tile < end; ++tile) {
      analyze_tile(head, chunk, tile);
    }
  }

 private:
  using Walk::first_, Walk::h_, Walk::range_, Walk::sequence_, Walk::softmax_;

  // The tile that the block is at. It is in shared memory, and so are sums: registers are scarce.
  struct Place {
    std::int64_t head, chunk;  // head counts from the launch's first
    std::int64_t result;       // where the first row has its results
    std::int64_t position;     // of the first row among the keys
    TilePieces pieces;
  };
  __device__ static Place& place() {
    __shared__ Place at;
    return at;
  }
  __device__ static int tile_rows() { return place().pieces.rows; }

  // One of the thread's rows: what turns its scores into weights.
  struct Row {
    bool real = false;      // a row of the tile, not one past its end
    bool doubtful = false;  // the given lse is not what its weights are relative to
    Real base = 0, factor = 0, log_total = 0;
  };

  // A row's sums over the keys of this thread.
  enum Sum { entropy_sum, distance_sum, near_sum };
  __device__ double& sum_of(int own, Sum which) const { return sums_[(own * row_sums + which) * threads]; }

  // The list of a row's largest weights, in global memory.
  struct TopRow {
    Real least;   // its last weight, 0 while there is room
    bool raised;  // the tile has a weight above it
    std::int64_t filled;
  };
  __device__ static TopRow* top_rows() {
    __shared__ TopRow list[rows];
    return list;
  }

  __device__ void analyze_tile(std::int64_t head, std::int64_t chunk, std::int64_t tile) {
    const std::int64_t of_all = args_.first_head + head, b = of_all / args_.heads, h = of_all % args_.heads;
    const std::int64_t first = args_.row_begin + tile * rows;
    const int count = static_cast<int>(smaller(rows, args_.row_end - first));
    this->start(b, h, first, count);
    if (threadIdx.x == 0) {
      place() = {head, chunk, of_all * args_.query_len + first, first + sequence_.offset,
                 tile_pieces(tile, count, args_.row_cell)};
    }
    if (args_.top > 0 && static_cast<int>(threadIdx.x) < rows) {
      top_rows()[threadIdx.x] = {};
    }
    __syncthreads();
    const std::int64_t begin = larger(range_.begin, args_.key_begin), end = smaller(range_.end, args_.key_end);
    // An empty walk too waits for the queries that were copied.
    const std::int64_t aligned = begin < end ? args_.key_begin + (begin - args_.key_begin) / keys * keys : end;
    if (args_.given_lse.data == nullptr || __syncthreads_or(has_doubtful_row(b, aligned, end)) != 0) {
      this->walk_for_softmax(Stage::weights);
    }
    begin_rows(b);
    this->walk(Stage::weights, aligned, end, [&](std::int64_t key, Scores& scores) { take(key, scores); });
    end_rows();
  }

  // The given lse of row r of the tile.
  __device__ Real given_lse(std::int64_t b, int r) const {
    const Rows& lse = args_.given_lse;
    return r < tile_rows() ? head_of<Real>(lse, b, h_)[(first_ + r) * lse.row] : Real(0);
  }

  // Finds which of this thread's rows have weights that the given lse does not give, because it says too little of
  // them: large, or where large products cancel, since a small lse is as far from scores that another kernel rounded as
  // they are from each other. Weights do not add up to 1 then. Whether there is such a row. A NaN says nothing.
  __device__ bool has_doubtful_row(std::int64_t b, std::int64_t begin, std::int64_t end) {
    Real lse[own_rows], sums[own_rows] = {};
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      lse[m] = given_lse(b, this->row_of(m));
    }
    this->walk(Stage::weights, begin, end, [&](std::int64_t key, Scores& scores) {
      const int width = static_cast<int>(smaller(keys, args_.key_end - key));
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        const Real score = Walk::at(scores, slot);
        const bool none = score == -infinity<Real>() || this->col_of(slot) >= width;
        sums[Walk::own_row(slot)] += none ? Real(0) : exponential(score - lse[Walk::own_row(slot)]);
      }
    });
    const bool all_keys = args_.key_begin == 0 && args_.key_end == args_.key_len && args_.sinks.data == nullptr;
    bool any = false;
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      const double sum = Walk::sum_over_row(sums[m]);
      const bool too_few = all_keys && lse[m] != -infinity<Real>() && sum < 1 - 0x1p-6;
      const bool real = this->row_of(m) < tile_rows();
      rows_[m].doubtful = real && (is_coarse(lse[m]) || sum > 1 + 0x1p-6 || too_few);
      any |= rows_[m].doubtful;
    }
    return any;
  }

  __device__ void begin_rows(std::int64_t b) {
    const Real sink = sink_of<Real>(args_, h_);
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      Row row;
      const int r = this->row_of(m);
      row.real = r < tile_rows();
      if (args_.given_lse.data != nullptr && !rows_[m].doubtful) {
        row.base = given_lse(b, r);
        row.factor = 1;
      } else {
        const bool padding = first_ + r >= sequence_.real_queries;
        Real lse = padding ? -infinity<Real>() : sink;
        if (!softmax_[m].empty()) {
          row.base = reference(softmax_[m].highest);
          row.factor = 1 / softmax_[m].total;
          row.log_total = logarithm(softmax_[m].total);
          lse = softmax_[m].lse();
        }
        if (args_.lse != nullptr && row.real && this->leads_rows()) {
          static_cast<Real*>(args_.lse)[place().result + r] = lse;
        }
      }
      rows_[m] = row;
      sum_of(m, entropy_sum) = sum_of(m, distance_sum) = sum_of(m, near_sum) = 0;
    }
  }

  // One tile of scores, from registers to everything that is asked for.
  __device__ void take(std::int64_t key, Scores& scores) {
    const int width = static_cast<int>(smaller(keys, args_.key_end - key));
    Real weights[slots];
    const bool above = to_weights(key, width, scores, weights);
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

  // Scores become weights, 0 outside of the rectangle, and join the rows' sums. Whether one is among its row's largest.
  __device__ bool to_weights(std::int64_t key, int width, Scores& scores, Real (&weights)[slots]) {
    Real entropy[own_rows] = {};
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      const int m = Walk::own_row(slot);
      const Row& row = rows_[m];
      const Real score = Walk::at(scores, slot);
      const bool none = score == -infinity<Real>() || !row.real || this->col_of(slot) >= width;
      const Real p = none ? Real(0) : exponential(score - row.base) * row.factor;
      // -p log p; a weight that vanished may have an infinite logarithm, and a NaN stays one.
      entropy[m] += p > 0 ? p * (row.base - score + row.log_total) : p;
      weights[slot] = p;
    }
    bool above = false;
    if (args_.top > 0) {
#pragma unroll
      for (int m = 0; m < own_rows; ++m) {
        TopRow& list = top_rows()[this->row_of(m)];
        bool raised = false;
#pragma unroll
        for (int slot = 0; slot < slots; ++slot) {
          raised = raised || (Walk::own_row(slot) == m && weights[slot] > list.least);
        }
        if (raised) {
          list.raised = above = true;
        }
      }
    }
    if (args_.entropy != nullptr) {
      add_row_sums(key, weights, entropy);
    }
    return above;
  }

  __device__ void add_row_sums(std::int64_t key, const Real (&weights)[slots], const Real (&entropy)[own_rows]) {
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      const std::int64_t ahead = key - place().position - this->row_of(m);  // of the tile's first key
      const int near_begin = column(-ahead - args_.near_left), near_end = column(-ahead + args_.near_right + 1);
      Real distance = 0, near = 0;
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        if (Walk::own_row(slot) == m) {
          const int col = this->col_of(slot);
          const Real signed_distance = static_cast<Real>(ahead) + static_cast<Real>(col);
          distance += weights[slot] * (signed_distance < 0 ? -signed_distance : signed_distance);
          near += col >= near_begin && col < near_end ? weights[slot] : Real(0);
        }
      }
      sum_of(m, entropy_sum) += entropy[m];
      sum_of(m, distance_sum) += distance;
      sum_of(m, near_sum) += near;
    }
  }

  // A key's place in the tile, cut to it.
  __device__ static int column(std::int64_t ahead) { return static_cast<int>(smaller(larger(ahead, 0), keys)); }

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

  // The warps share the rows that have something to list. The lanes of one look at the row together; what is above the
  // row's last one enters in the order of the keys. The list is in order, the smaller key first where weights are
  // equal: equal ones further on stay behind.
  __device__ void raise_top(std::int64_t key, int width) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (int r = warp; r < tile_rows(); r += threads / 32) {
      TopRow list = top_rows()[r];
      if (!list.raised) {
        continue;
      }
#pragma unroll 1
      for (int c = 0; c < width; c += 32) {
        const Real weight = c + lane < width ? tile_[r * stride + c + lane] : Real(0);
        std::uint32_t left = __ballot_sync(0xffffffffu, weight > list.least);
#pragma unroll 1
        for (; left != 0; left &= left - 1) {
          const int from = __ffs(static_cast<int>(left)) - 1;
          const Real next = __shfl_sync(0xffffffffu, weight, from);
          if (lane == 0) {
            insert(list, r, next, key + c + from);
          }
        }
        list.least = __shfl_sync(0xffffffffu, list.least, 0);
      }
      if (lane == 0) {
        list.raised = false;
        top_rows()[r] = list;
      }
    }
  }

  // One more weight, if it is above the last one still.
  __device__ void insert(TopRow& list, int r, Real weight, std::int64_t key) const {
    if (!(weight > list.least)) {
      return;
    }
    Real* listed = static_cast<Real*>(args_.top_weights) + (place().result + r) * args_.top;
    std::int64_t* listed_keys = args_.top_keys + (place().result + r) * args_.top;
    std::int64_t at = list.filled < args_.top ? list.filled++ : args_.top - 1;
#pragma unroll 1
    for (; at > 0 && listed[at - 1] < weight; --at) {
      listed[at] = listed[at - 1];
      listed_keys[at] = listed_keys[at - 1];
    }
    listed[at] = weight;
    listed_keys[at] = key;
    list.least = list.filled < args_.top ? Real(0) : listed[args_.top - 1];
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
    args_.received[(place().head * args_.chunks + place().chunk) * args_.key_len + key + c] += sum;
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
      const std::int64_t target = (place().head * args_.pieces + pieces.number(piece)) * args_.columns + cell;
      args_.cell_sums[target] += found.sum;
      Real& stored = static_cast<Real*>(args_.cell_highest)[target];
      stored = found.highest > stored ? found.highest : stored;
    }
  }

  __device__ void end_rows() {
    if (args_.entropy == nullptr) {
      return;
    }
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      const double entropy = Walk::sum_over_row(sum_of(m, entropy_sum));
      const double distance = Walk::sum_over_row(sum_of(m, distance_sum));
      const double near = Walk::sum_over_row(sum_of(m, near_sum));
      if (rows_[m].real && this->leads_rows()) {
        const std::int64_t at = place().result + this->row_of(m);
        static_cast<Real*>(args_.entropy)[at] = static_cast<Real>(entropy);
        static_cast<Real*>(args_.distance)[at] = static_cast<Real>(distance);
        static_cast<Real*>(args_.near)[at] = static_cast<Real>(near);
      }
    }
  }

  const AnalysisArguments& args_;
  Real* tile_;    // [rows][stride]
  double* sums_;  // [own_rows][row_sums][threads], this thread's
  Row rows_[own_rows];
};

// A head's last chunks have the most keys when it is causal: they begin first.
template <class Walk>
__device__ inline void analyze_chunks(const AnalysisArguments& arguments, unsigned char* shared) {
  TileAnalysis<Walk> analysis(arguments, shared);
  const std::int64_t tasks = arguments.head_count * arguments.chunks;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    analysis.run(task % arguments.head_count, arguments.chunks - 1 - task / arguments.head_count);
  }
}

}  // namespace headway::cuda
