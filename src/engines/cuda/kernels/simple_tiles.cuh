// The tiles of an analysis that are nearly all of a long sequence, by a kernel that does nothing else: every row sees
// all of their keys, none or all of them near, and cells are at least as large. What they have for keys and cells stays
// in registers too: a warp's sums down its columns go to shared memory, and join the other warps' after the next
// barrier of the walk, so that a tile needs no barrier of its own; those of a cell stay until another one follows.
#pragma once

#include "engines/cuda/kernels/analysis_rows.cuh"
#include "engines/cuda/ptx/warp.cuh"

namespace headway::cuda {

template <class Walk>
class SimpleTiles : AnalysisRows<Walk> {
 public:
  using Rows = AnalysisRows<Walk>;
  using Real = typename Walk::Real;
  using Scores = typename Walk::Scores;
  using Rows::block_threads, Rows::shared_bytes;

  __device__ SimpleTiles(const AnalysisArguments& args, unsigned char* shared) : Rows(args, shared) {}

  // The simple tiles of some rows, and their softmax over whole tiles, after that over the other ones. What the latter
  // left is read, and what this leaves is written; rows with scores that are not finite, or so large that one kernel's
  // are not another's, are left out.
  __device__ void analyze_tile(std::int64_t head, std::int64_t chunk, std::int64_t tile) {
    const std::int64_t b = (args_.first_head + head) / args_.heads;
    this->start_tile(b, head, chunk, tile);
    this->load_softmax(true);
    const typename Walk::WholeSoftmax softmax = this->walk_whole_for_softmax();
    this->begin_rows(b);
    bound_lists(softmax);
    bool odd = !softmax.ordinary;
    constexpr Real largest_base = 1 << 12;
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      odd = odd || !(fabs(rows_[m].base) < largest_base);
    }
    odd = __syncthreads_or(odd) != 0;
    if (threadIdx.x == 0) {
      this->left_out() = odd ? 1 : 0;
    }
    if (odd) {
      return;
    }
    this->store_softmax();
    const std::int64_t end = range_.end;
#pragma unroll 1
    for (std::int64_t key = this->first_key(); key < end; key += keys) {
      const std::int64_t simple_end = this->simple_end(key, end);
      if (simple_end > key) {
        take_simple_tiles(key, simple_end);
        key = simple_end - keys;
      }
    }
    this->store_row_sums();
  }

 private:
  using Rows::args_, Rows::range_, Rows::rows_, Rows::tile_;
  using Rows::entropy_sum, Rows::distance_sum, Rows::near_sum;
  using Rows::keys, Rows::own_rows, Rows::rows, Rows::slots, Rows::stride, Rows::threads;
  using Rows::most_keys, Rows::most_pieces;
  using Rows::place, Rows::sum_of, Rows::top_rows;
  using typename Rows::Row;

  __device__ void take_simple_tiles(std::int64_t begin, std::int64_t end) {
    Run run;
    run.scale = bounded<Real>(args_.scale);
    run.after = begin > place().position;
    run.near = begin >= place().position + rows - 1 - args_.near_left &&
               begin + keys - 1 <= place().position + args_.near_right;
    if (args_.cell_sums != nullptr) {
      run.cell = static_cast<int>((begin - args_.key_begin) / args_.key_cell);
      run.keys_left = static_cast<int>(smaller((run.cell + 1) * args_.key_cell - (begin - args_.key_begin), most_keys));
    }
    move_lists(false);
    this->walk_whole(begin, end, [&](std::int64_t key, Scores& scores) { take(run, key, scores); });
    add_left(run, end - keys);
    keep_row_sums(run);
    move_lists(true);
    if (args_.cell_sums != nullptr && run.keys_left < args_.key_cell) {
      leave_cell(run);
      __syncthreads();
      add_cell(run);
    }
  }

  // A list needs no weights below that of a score which enough others reach, with some room for what an exponential may
  // be off by.
  __device__ void bound_lists(const typename Walk::WholeSoftmax& softmax) {
    constexpr Real room = 1 - Real(1) / (1 << 18), smallest = Real(1e-30);
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      const Real weight = exponential(softmax.bound[m] - rows_[m].base) * rows_[m].factor * room;
      if (this->leads_rows() && args_.top <= Walk::bounded_scores && weight > smallest) {
        top_rows()[this->row_of(m)].least = weight;
      }
    }
  }

  static constexpr int warps = threads / 32;
  static constexpr int most_listed = 16;  // of a row, in shared memory
  static_assert((keys + 16 * most_listed) * sizeof(Real) + 16 * most_listed * sizeof(std::int64_t) <=
                16 * stride * sizeof(Real));

  struct RowSums {
    Real entropy = 0, distance = 0, near = 0;
  };

  // What the warps leave for each other. Two: one is read by slow warps while others fill the next.
  struct Left {
    Real columns[warps][keys];
    Real cell_sums[most_pieces][warps];
    Real cell_highest[most_pieces][warps];
  };
  __device__ static Left& left(int which) {
    __shared__ Left two[2];
    return two[which];
  }

  // Simple tiles that follow each other. f32 sums are of up to `most_tiles` of them.
  static constexpr int most_tiles = 16;
  struct Run {
    Real scale;  // what makes products scores
    bool after;  // the rows' own keys; else before
    bool near;
    bool any = false;                            // there was a tile before: it left its columns,
    bool left_cell = false, ended_cell = false;  // the sums of its cell, and it was the cell's last one
    int turn = 0, tiles = 0;
    int cell = 0;
    int keys_left = 0;       // of the cell, at most most_keys
    RowSums rows[own_rows];  // of this thread
    Real cell_sums[own_rows] = {}, cell_highest[own_rows] = {};
  };

  __device__ void take(Run& run, std::int64_t key, Scores& scores) {
    add_left(run, key - keys);
    Real weights[slots], sums[own_rows] = {}, highest[own_rows] = {};
    to_simple_weights(run, key, scores, weights, sums);
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      highest[Walk::own_row(slot)] = fmax(highest[Walk::own_row(slot)], weights[slot]);
    }
    if (args_.top > 0) {
      raise_top_of_warp(key, weights, highest);
    }
    if (args_.received != nullptr) {
      *reinterpret_cast<float2*>(left(run.turn).columns[warp()] + this->summed_column()) = this->column_sums(weights);
    }
    const bool full = ++run.tiles == most_tiles;
    if (full) {
      keep_row_sums(run);
      run.tiles = 0;
    }
    if (args_.cell_sums != nullptr) {
      if (run.keys_left >= keys) [[likely]] {
        add_to_cell(run, sums, highest);
      } else {
        add_columns_to_cell(run, 0, run.keys_left, weights);
      }
      run.ended_cell = run.keys_left <= keys;
      run.left_cell = run.ended_cell || full;
      if (run.left_cell) {
        leave_cell(run);
      }
      if (run.ended_cell) {
        if (run.keys_left < keys) {
          add_columns_to_cell(run, run.keys_left, keys, weights);
        }
        run.keys_left += static_cast<int>(smaller(args_.key_cell, most_keys));
      }
      run.keys_left -= keys;
    }
    run.any = true;
  }

  __device__ static void add_to_cell(Run& run, const Real (&sums)[own_rows], const Real (&highest)[own_rows]) {
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      run.cell_sums[m] += sums[m];
      run.cell_highest[m] = fmax(run.cell_highest[m], highest[m]);
    }
  }

  // Columns [begin, end) of the tile.
  __device__ void add_columns_to_cell(Run& run, int begin, int end, const Real (&weights)[slots]) const {
    Real sums[own_rows] = {}, highest[own_rows] = {};
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      const int m = Walk::own_row(slot);
      const bool inside = this->col_of(slot) >= begin && this->col_of(slot) < end;
      const Real weight = inside ? weights[slot] : Real(0);
      sums[m] += weight;
      highest[m] = fmax(highest[m], weight);
    }
    add_to_cell(run, sums, highest);
  }

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }

  // Products of a simple tile, which are finite, become weights and join the rows' sums. `sums` are those of the
  // weights.
  __device__ void to_simple_weights(Run& run, std::int64_t key, Scores& products, Real (&weights)[slots],
                                    Real (&sums)[own_rows]) {
    Real lowest = 0;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      Real& below = Walk::at(products, slot);
      below = fma(below, run.scale, -rows_[Walk::own_row(slot)].base);  // now the score, as far as below the base
      lowest = fmin(lowest, below);
    }
    constexpr Real lowest_normal = -87;  // whose exponential is
    if (lowest > lowest_normal) [[likely]] {
      add_weights<true>(products, weights, sums, run);
    } else {
      add_weights<false>(products, weights, sums, run);
    }
    if (args_.entropy != nullptr) {
#pragma unroll
      for (int m = 0; m < own_rows; ++m) {
        run.rows[m].distance +=
            run.after ? distance_to<true>(key, m, sums[m], weights) : distance_to<false>(key, m, sums[m], weights);
        if (run.near) {
          run.rows[m].near += sums[m];
        }
      }
    }
  }

  template <bool AllNormal>
  __device__ void add_weights(Scores& below, Real (&weights)[slots], Real (&sums)[own_rows], Run& run) const {
    Real logarithms[own_rows] = {};
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      const int m = Walk::own_row(slot);
      const Real score = Walk::at(below, slot);
      const Real power = AllNormal ? Walk::vanishing_exponential(score) : exponential(score);
      weights[slot] = power * rows_[m].factor;
      sums[m] += weights[slot];
      logarithms[m] = fma(weights[slot], score, logarithms[m]);
    }
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      run.rows[m].entropy += fma(sums[m], rows_[m].log_total, -logarithms[m]);
    }
  }

  // The sum of weights times distances, for own row m: that to the thread's nearest key, and from there to the others,
  // so that nothing cancels. Keys are all after the row's position, or all before it.
  template <bool After>
  __device__ Real distance_to(std::int64_t key, int m, Real total, const Real (&weights)[slots]) const {
    constexpr int last = Walk::column_step(slots - 1);
    Real steps = 0;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      if (Walk::own_row(slot) == m) {
        const int step = After ? Walk::column_step(slot) : last - Walk::column_step(slot);
        steps = fma(weights[slot], static_cast<Real>(step), steps);
      }
    }
    const std::int64_t ahead = key + this->first_column() - (place().position + this->row_of(m));
    return fma(total, static_cast<Real>(After ? ahead : -ahead - last), steps);
  }

  // A warp has its rows to itself. Short lists of them are in its part of the tile's memory, behind a row of weights.
  __device__ void raise_top_of_warp(std::int64_t key, const Real (&weights)[slots], const Real (&highest)[own_rows]) {
    std::uint32_t raised = 0;  // a bit for each row of the warp
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      const int row = this->row_of(m);
      raised |= highest[m] > top_rows()[row].least ? 1u << row % 16 : 0u;
    }
    Real* one_row = tile_ + warp() * 16 * stride;
#pragma unroll 1
    for (raised = __reduce_or_sync(0xffffffffu, raised); raised != 0; raised &= raised - 1) {
      const int at = __ffs(static_cast<int>(raised)) - 1, r = warp() * 16 + at;
#pragma unroll
      for (int slot = 0; slot < slots; slot += 2) {
        if (this->row_of(Walk::own_row(slot)) == r) {
          *reinterpret_cast<float2*>(one_row + this->col_of(slot)) = {weights[slot], weights[slot + 1]};
        }
      }
      __syncwarp();
      const TopList<Real> list = has_short_lists() ? short_list(at) : this->list_of(r);
      this->raise_row(one_row, r, key, keys, false, list);
    }
  }

  __device__ bool has_short_lists() const { return args_.top > 0 && args_.top <= most_listed; }
  __device__ TopList<Real> short_list(int row) const {
    Real* weights = tile_ + warp() * 16 * stride + keys;
    auto* listed_keys = reinterpret_cast<std::int64_t*>(weights + 16 * most_listed);
    return {weights + row * most_listed, listed_keys + row * most_listed, args_.top};
  }

  // The warp's short lists, from global memory to shared memory or back.
  __device__ void move_lists(bool back) const {
    __syncwarp();
    const int top = has_short_lists() ? static_cast<int>(args_.top) : 0;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) % 32; at < 16 * top; at += 32) {
      const int r = at / top, n = at % top;
      const TopList<Real> here = short_list(r), there = this->list_of(warp() * 16 + r);
      const TopList<Real>&from = back ? here : there, &to = back ? there : here;
      to.weights[n] = from.weights[n];
      to.keys[n] = from.keys[n];
    }
    __syncwarp();
  }

  // Sums of rows over tiles of f32 join those in f64.
  __device__ void keep_row_sums(Run& run) {
    if (args_.entropy != nullptr) {
#pragma unroll
      for (int m = 0; m < own_rows; ++m) {
        sum_of(m, entropy_sum) += run.rows[m].entropy;
        sum_of(m, distance_sum) += run.rows[m].distance;
        sum_of(m, near_sum) += run.rows[m].near;
        run.rows[m] = {};
      }
    }
  }

  // The sums of the cell go from registers to shared memory, each row's to its piece.
  __device__ void leave_cell(Run& run) {
    const int pieces = place().pieces.count, border = place().pieces.end(0);
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) {
      Real sum = 0, highest = 0;
#pragma unroll
      for (int m = 0; m < own_rows; ++m) {
        const bool inside = (this->row_of(m) < border) == (piece == 0);
        sum += inside ? run.cell_sums[m] : Real(0);
        highest = fmax(highest, inside ? run.cell_highest[m] : Real(0));
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      }
      highest = ptx::warp_maximum(highest);
      if (threadIdx.x % 32 == 0) {
        left(run.turn).cell_sums[piece][warp()] = sum;
        left(run.turn).cell_highest[piece][warp()] = highest;
      }
    }
#pragma unroll
    for (int m = 0; m < own_rows; ++m) {
      run.cell_sums[m] = run.cell_highest[m] = 0;
    }
  }

  // Adds up what warps left of the tile before; a barrier lies between.
  __device__ void add_left(Run& run, std::int64_t key) {
    const int at = static_cast<int>(threadIdx.x);
    if (run.any && args_.received != nullptr && at < keys) {
      double sum = 0;
#pragma unroll
      for (int w = 0; w < warps; ++w) {
        sum += left(run.turn).columns[w][at];
      }
      ptx::add_to(place().targets.received[key + at], sum);
    }
    if (run.left_cell) {
      add_cell(run);
      run.cell += run.ended_cell ? 1 : 0;
      run.left_cell = run.ended_cell = false;
    }
    run.turn ^= 1;
  }

  __device__ void add_cell(const Run& run) {
    const int piece = threads - 1 - static_cast<int>(threadIdx.x);
    if (piece < place().pieces.count) {
      double sum = 0;
      Real highest = 0;
#pragma unroll
      for (int w = 0; w < warps; ++w) {
        sum += left(run.turn).cell_sums[piece][w];
        highest = fmax(highest, left(run.turn).cell_highest[piece][w]);
      }
      const std::int64_t target = piece * args_.columns + run.cell;
      ptx::add_to(place().targets.cell_sums[target], sum);
      ptx::raise_to(place().targets.cell_highest[target], highest);
    }
  }
};

// Blocks that a multiprocessor should hold.
template <int Depth>
constexpr int simple_blocks = Depth == 64    ? 4
                              : Depth == 128 ? 3
                                             : 2;

}  // namespace headway::cuda
