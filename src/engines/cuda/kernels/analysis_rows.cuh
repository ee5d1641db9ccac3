// The rows of an analysis: the block's place, the softmax that turns a row's scores into weights, its sums over them,
// and the list of its largest.
#pragma once

#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/analysis_pieces.h"
#include "engines/cuda/kernels/plain_rows.cuh"
#include "engines/cuda/kernels/top_list.cuh"
#include "engines/cuda/ptx/reduce.cuh"

namespace headway::cuda {

// Where sums of a tile of rows go: [keys], and [cells along the keys] of the first of its pieces. Null: not asked for.
template <class Real>
struct TileTargets {
  double* received;
  double* cell_sums;
  Real* cell_highest;
};

template <class Walk>
class AnalysisRows : protected Walk {
 public:
  using typename Walk::Real, typename Walk::Scores;
  static constexpr int rows = Walk::rows, keys = Walk::keys, threads = Walk::threads;
  static constexpr int block_threads = threads;
  static constexpr int slots = Walk::slots, own_rows = Walk::own_rows;
  static_assert(rows == analysis_rows && rows <= threads && keys <= threads);
  static constexpr int stride = keys + 8;  // of a row of weights in shared memory: pairs of 8 rows in all banks
  static constexpr int weights_bytes = rows * stride * static_cast<int>(sizeof(Real));

  static constexpr int tile_bytes = weights_bytes > Walk::scratch_bytes ? weights_bytes : Walk::scratch_bytes;
  static constexpr int row_sums = 3;  // of each row
  static constexpr bool sums_in_registers = Walk::has_registers_left;
  static constexpr std::size_t sums_bytes = sums_in_registers ? 0 : row_sums * own_rows * threads * sizeof(double);

  // The tile of weights lies where the walk has its scratch.
  __host__ __device__ static std::size_t shared_bytes(std::int64_t head_dim) {
    return Walk::walk_bytes(head_dim) - Walk::scratch_bytes + tile_bytes + sums_bytes;
  }

 protected:
  using Walk::first_, Walk::h_, Walk::range_, Walk::sequence_, Walk::softmax_;

  __device__ AnalysisRows(const AnalysisArguments& args, unsigned char* shared)
      : Walk(args, shared),
        args_(args),
        tile_(this->scratch_),
        sums_(reinterpret_cast<double*>(reinterpret_cast<unsigned char*>(tile_) + tile_bytes) + threadIdx.x) {}

  // The tile that the block is at.
  struct Place {
    std::int64_t head, chunk;  // head counts from the launch's first
    std::int64_t result;       // where the first row has its results
    std::int64_t position;     // of the first row among the keys
    TilePieces pieces;
    TileTargets<Real> targets;
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
  __device__ double& sum_of(int own, Sum which) {
    if constexpr (sums_in_registers) {
      return own_sums_[own][which];
    } else {
      return sums_[(own * row_sums + which) * threads];
    }
  }

  // The list of a row's largest weights, in global memory.
  struct TopRow {
    Real least;   // its last weight, while there is room a number that some weights are known to be above, or 0
    bool raised;  // the tile has a weight above it
  };
  __device__ static TopRow* top_rows() {
    __shared__ TopRow list[rows];
    return list;
  }

  // The block turns to a tile of rows.
  __device__ void start_tile(std::int64_t b, std::int64_t head, std::int64_t chunk, std::int64_t tile) {
    const std::int64_t of_all = args_.first_head + head, first = args_.row_begin + tile * rows;
    const int count = static_cast<int>(smaller(rows, args_.row_end - first));
    this->start(b, of_all % args_.heads, first, count);
    if (threadIdx.x == 0) {
      const TilePieces pieces = tile_pieces(tile, count, args_.row_cell);
      place() = {head,
                 chunk,
                 of_all * args_.query_len + first,
                 first + sequence_.offset,
                 pieces,
                 targets_of(head, chunk, pieces)};
    }
    if (args_.top > 0 && static_cast<int>(threadIdx.x) < rows) {
      top_rows()[threadIdx.x] = {};
    }
    __syncthreads();
  }

  __device__ TileTargets<Real> targets_of(std::int64_t head, std::int64_t chunk, const TilePieces& pieces) const {
    const std::int64_t cell = (head * args_.pieces + pieces.number(0)) * args_.columns;
    return {args_.received == nullptr ? nullptr : args_.received + (head * args_.chunks + chunk) * args_.key_len,
            args_.cell_sums == nullptr ? nullptr : args_.cell_sums + cell,
            args_.cell_sums == nullptr ? nullptr : static_cast<Real*>(args_.cell_highest) + cell};
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

  // Where the simple tiles from `key` on end, if that begins one; else `key`. They are whole, away from the rows' own
  // keys, none or all of their keys are near, and cells are at least as large.
  __device__ std::int64_t simple_end(std::int64_t key, std::int64_t end) const {
    const TilePieces& pieces = place().pieces;
    if (pieces.rows < rows || (args_.cell_sums != nullptr && (pieces.count > most_pieces || args_.key_cell < keys))) {
      return key;
    }
    const typename Walk::WholeTiles whole = this->whole_tiles(key, end);
    if (whole.begin > key) {
      return key;
    }
    // Keys [from, to) that are not: the first, the rows' own, and those that only some rows have near.
    const std::int64_t own = place().position, left = own - args_.near_left, right = own + args_.near_right + 1;
    std::int64_t limit = whole.end;
    const auto exclude = [&](std::int64_t from, std::int64_t to) { limit = to > key ? smaller(limit, from) : limit; };
    exclude(0, 1);
    exclude(own, own + rows);
    exclude(left, left + rows - 1);
    exclude(right, right + rows - 1);
    return limit <= key ? key : key + smaller(limit - key, most_keys / 2) / keys * keys;
  }
  static constexpr int most_pieces = 2;  // of a simple tile: rows of cells that it is in
  static constexpr std::int64_t most_keys = std::int64_t{1} << 29;

  // The rows' softmax and sums in memory. Threads that share a row have shares of the softmax's total, or all of it.
  __device__ std::int64_t stored_row(int r) const {
    return place().head * (args_.row_end - args_.row_begin) + place().pieces.tile * rows + r;
  }
  __device__ int& left_out() const { return args_.left_out[place().head * args_.tiles + place().pieces.tile]; }
  __device__ void store_softmax() const {
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      if (this->leads_rows() && this->row_of(m) < tile_rows()) {
        float* stored = args_.row_softmax + stored_row(this->row_of(m)) * 2;
        stored[0] = softmax_[m].highest;
        stored[1] = softmax_[m].total;
      }
    }
  }
  __device__ void load_softmax(bool shares) {
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      if (this->row_of(m) < tile_rows()) {
        const float* stored = args_.row_softmax + stored_row(this->row_of(m)) * 2;
        softmax_[m].highest = stored[0];
        softmax_[m].total = shares && !this->leads_rows() ? Real(0) : stored[1];
      }
    }
  }
  __device__ void store_row_sums() {
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
#pragma unroll
      for (int sum = 0; sum < row_sums; ++sum) {
        const double all = Walk::sum_over_row(sum_of(m, static_cast<Sum>(sum)));
        if (this->leads_rows() && this->row_of(m) < tile_rows()) {
          args_.row_sums[stored_row(this->row_of(m)) * row_sums + sum] = all;
        }
      }
    }
  }
  __device__ void load_row_sums() {
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
#pragma unroll
      for (int sum = 0; sum < row_sums; ++sum) {
        if (this->leads_rows() && this->row_of(m) < tile_rows()) {
          sum_of(m, static_cast<Sum>(sum)) = args_.row_sums[stored_row(this->row_of(m)) * row_sums + sum];
        }
      }
    }
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

  // Scores become weights, 0 outside of the rectangle, and join the rows' sums.
  __device__ void to_weights(std::int64_t key, int width, Scores& scores, Real (&weights)[slots]) {
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
    if (args_.entropy != nullptr) {
      add_row_sums(key, weights, entropy);
    }
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

  __device__ TopList<Real> list_of(int r) const {
    const std::int64_t entry = (place().result + r) * args_.top;
    return {static_cast<Real*>(args_.top_weights) + entry, args_.top_keys + entry, args_.top};
  }

  // Whether a weight is among a row's largest so far. Beside simple tiles, which come first, equal ones may be, too.
  __device__ static bool is_above(Real weight, Real least, bool ties) {
    return weight > least || (ties && weight == least && weight > 0);
  }

  // The lanes of a warp look at a row of the tile together; what is above its list's last weight enters that.
  __device__ static void raise_row(const Real* row, int r, std::int64_t key, int width, bool ties, TopList<Real> list) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Real least = top_rows()[r].least;
#pragma unroll 1
    for (int c = lane; c - lane < width; c += 32) {
      const Real weight = c < width ? row[c] : Real(0);
      const std::uint32_t entering = __ballot_sync(0xffffffffu, is_above(weight, least, ties));
      if (entering != 0) {
        const Real last = list.enter(entering, weight, key + c);
        least = last > least ? last : least;
      }
    }
    __syncwarp();  // the mark has been read
    if (lane == 0) {
      top_rows()[r] = {least, false};
    }
    __syncwarp();
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
  Real* tile_;    // [rows][stride], where the walk has its scratch
  double* sums_;  // [own_rows][row_sums][threads], this thread's, or
  double own_sums_[own_rows][row_sums];
  Row rows_[own_rows];
};

}  // namespace headway::cuda
