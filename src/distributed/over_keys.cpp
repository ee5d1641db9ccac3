// Keys and values move, queries stay (ring, all_gather). Each step computes the tiles whose keys have arrived, while
// the next step's keys are being transferred.
#include <algorithm>
#include <iterator>
#include <map>

#include "core/elements.h"
#include "core/key_range.h"
#include "distributed/key_traffic.h"
#include "distributed/rank_tiles.h"
#include "distributed/row_math.h"
#include "distributed/rows.h"

namespace headway::distributed {
namespace {

class Forward {
 public:
  explicit Forward(const ForwardRun& run)
      : run_(run), merged_(run.without_sinks()), traffic_(run), work_(run), blocks_(work_.segments.size()) {}

  void run() {
    for (int step = 0; step < run_.schedule.steps; ++step) {
      traffic_.begin(step);
      for (const Tile& tile : work_.tiles) {
        if (tile.step == step) {
          compute(work_.segment_of(tile), tile);
        }
      }
      traffic_.end();
    }
    for (std::size_t n = 0; n < blocks_.size(); ++n) {
      if (work_.segments[n].tiles != 1) {
        finish(n);
      }
    }
  }

 private:
  // The data of a segment of the queries.
  struct Block {
    std::optional<RowMerge> merge = {};
    std::optional<Tensor> wide_query = {};  // in the accumulator's type, where that is another
  };

  template <class View>
  View rows_of(const View& view, std::size_t n) const {
    const Segment& segment = work_.segments[n];
    return view.slice(2, segment.first, segment.first + segment.rows.count());
  }

  RowMerge& merge_of(std::size_t n) {
    if (!blocks_[n].merge) {
      const Sizes& sizes = run_.sizes();
      blocks_[n].merge.emplace(sizes.batch, sizes.heads, work_.segments[n].rows.count(), sizes.value_dim);
    }
    return *blocks_[n].merge;
  }

  void compute(std::size_t n, const Tile& tile) {
    const bool alone = work_.segments[n].tiles == 1;  // all its keys in one call: nothing to merge, no wider type
    const KeyTraffic::Views keys = traffic_.rows(tile.keys, !alone);
    Part part{tile.queries, tile.keys, work_.segments[n].first, rows_of(run_.query, n), keys.key, keys.value};
    if (alone) {
      forward_part(run_.whole, part, rows_of(run_.out, n), rows_of(run_.lse, n));
      return;
    }
    if (run_.accumulator() != run_.sizes().dtype) {
      std::optional<Tensor>& wide_query = blocks_[n].wide_query;
      if (!wide_query) {
        wide_query = as_type(part.query, run_.accumulator());
      }
      part.query = *wide_query;
    }
    const Sizes& sizes = run_.sizes();
    const std::int64_t rows = tile.queries.count();
    Tensor out = Tensor::uninitialized({sizes.batch, sizes.heads, rows, sizes.value_dim}, run_.accumulator());
    Tensor lse = Tensor::uninitialized({sizes.batch, sizes.heads, rows}, run_.accumulator());
    forward_part_of_rows(merged_, part, out, lse);
    merge_of(n).add(out, lse);
  }

  void finish(std::size_t n) {
    const auto padding = padding_of(run_, work_.segments[n].rows);
    merge_of(n).finish(run_.whole.problem.sinks, padding ? &*padding : nullptr, rows_of(run_.out, n),
                       rows_of(run_.lse, n));
  }

  const ForwardRun& run_;
  Whole merged_;  // the sink is added once, at the end
  KeyTraffic traffic_;
  RankTiles work_;
  std::vector<Block> blocks_;  // of each segment
};

class Backward {
 public:
  explicit Backward(const BackwardRun& run)
      : run_(run),
        whole_(run.without_sinks()),  // their part is in lse
        traffic_(run),
        work_(run),
        query_(wide(run.query, wide_query_)),
        grad_out_(wide(run.grad_out, wide_grad_out_)),
        out_(wide(run.out, wide_out_)),
        query_sums_(work_.segments.size()),
        key_sums_(without(run.keys(), lone_keys()), sums_format(), true) {}

  void run() {
    for (int step = 0; step < run_.schedule.steps; ++step) {
      begin(step);
      for (const Tile& tile : work_.tiles) {
        if (tile.step == step) {
          compute(tile);
        }
      }
      keep_own();
      end();
    }
    store();
  }

 private:
  // Rows of gradients that another rank has computed for this one.
  struct Arriving {
    Rows rows;
    RowStore store;
  };

  RowFormat sums_format() const {
    RowFormat format = traffic_.gradient_format();
    format.dtype = DType::f64;
    return format;
  }

  ConstTensorView wide(ConstTensorView rows, std::optional<Tensor>& memory) const {
    if (rows.dtype() == run_.accumulator()) {
      return rows;
    }
    memory = as_type(rows, run_.accumulator());
    return *memory;
  }

  // This rank's keys to which only one tile contributes: their gradients need no sums.
  Shard lone_keys() const {
    std::map<std::int64_t, int> changes;  // where the number of those that add changes
    for (const Tile& tile : work_.tiles) {
      if (tile.step == 0) {
        changes[tile.keys.begin] += 1;
        changes[tile.keys.end] -= 1;
      }
    }
    for (const Transfer& one : run_.schedule.received_by(run_.rank())) {
      if (one.result) {
        changes[one.rows.begin] += 2;  // a tile, and what comes home
        changes[one.rows.end] -= 2;
      }
    }
    Shard lone;
    int adding = 0;
    for (auto change = changes.begin(); change != changes.end(); ++change) {
      adding += change->second;
      if (adding == 1) {
        lone.push_back({change->first, std::next(change)->first});
      }
    }
    return lone;
  }

  void begin(int step) {
    std::vector<Transport::Message> sends, receives;
    arriving_.clear();
    for (const Transfer& transfer : run_.schedule.transfers) {
      if (transfer.step != step || !transfer.result) {
        continue;
      }
      if (transfer.from == run_.rank()) {
        sends.push_back(gradients_.message(transfer.to, transfer.rows));
      } else if (transfer.to == run_.rank()) {
        arriving_.push_back({transfer.rows, RowStore({transfer.rows}, traffic_.gradient_format())});
        receives.push_back(arriving_.back().store.message(transfer.from, transfer.rows));
      }
    }
    traffic_.begin(step, sends, receives);
    gradients_ = RowStore(traffic_.runs(), traffic_.gradient_format(), true);
  }

  void end() {
    traffic_.end();
    for (const Arriving& one : arriving_) {  // in the schedule's order
      add_own(one.rows, one.store);
    }
  }

  // Gradients of this rank's own rows.
  void add_own(Rows rows, const RowStore& from) {
    for (const Rows& mine : key_sums_.runs()) {
      if (const Rows here = overlap(mine, rows); here.count() > 0) {
        add_rows(from.view(here), key_sums_.view(here));
      }
    }
  }

  // The destination of a part's gradients: the output itself if nothing else is added there, otherwise sums.
  class Target {
   public:
    Target(const Dims& sizes, DType accumulator, const std::optional<TensorView>& place) : place_(place) {
      if (!place || place->dtype() != accumulator) {
        own_ = Tensor::uninitialized(sizes, accumulator);
      }
    }
    TensorView view() { return own_ ? own_->view() : *place_; }
    void store() {
      if (own_ && place_) {
        copy_rows(*own_, *place_);
      }
    }

   private:
    std::optional<TensorView> place_;
    std::optional<Tensor> own_;
  };

  void compute(const Tile& tile) {
    const Sizes& sizes = run_.sizes();
    const std::size_t n = work_.segment_of(tile);
    const Segment& segment = work_.segments[n];
    const auto rows = [&](const auto& view) {
      return view.slice(2, segment.first, segment.first + segment.rows.count());
    };
    const KeyTraffic::Views keys = traffic_.rows(tile.keys, true);
    const bool alone = segment.tiles == 1;
    const bool of_longer_rows = !alone || run_.whole.problem.sinks;
    const Part part{tile.queries, tile.keys, segment.first, rows(query_), keys.key, keys.value, of_longer_rows};
    const bool received = gradients_.holds(tile.keys);
    const bool in_place = !received && !key_sums_.holds(tile.keys);  // some keys are lone_keys()
    const std::int64_t begin = local_row(run_.keys(), tile.keys);
    const auto place = [&](const std::optional<TensorView>& gradient) {
      return gradient && in_place ? std::optional(gradient->slice(2, begin, begin + tile.keys.count())) : std::nullopt;
    };
    const auto of = [&](std::int64_t heads, std::int64_t count, std::int64_t width) {
      return Dims{sizes.batch, heads, count, width};
    };
    Target dq(of(sizes.heads, tile.queries.count(), sizes.head_dim), run_.accumulator(),
              alone && run_.dq ? std::optional(rows(*run_.dq)) : std::nullopt);
    Target dk(of(sizes.kv_heads, tile.keys.count(), sizes.head_dim), run_.accumulator(), place(run_.dk));
    Target dv(of(sizes.kv_heads, tile.keys.count(), sizes.value_dim), run_.accumulator(), place(run_.dv));
    backward_part(whole_, part, rows(grad_out_), rows(out_), rows(run_.lse),
                  {dq.view(), dk.view(), dv.view(), run_.bias_sums});
    if (alone) {
      dq.store();
    } else {
      add_to(query_sums_[n], dq.view());
    }
    if (in_place) {  // where others add too, store() writes the sums over it
      dk.store();
      dv.store();
    }
    const RowStore& sums = received ? gradients_ : key_sums_;
    for (const Rows& run : sums.runs()) {
      if (const Rows here = overlap(run, tile.keys); here.count() > 0) {
        const auto rows_here = [&](const TensorView& view) {
          return view.slice(2, here.begin - tile.keys.begin, here.end - tile.keys.begin);
        };
        add_rows(rows_here(dk.view()), sums.view(here, 0, sizes.head_dim));
        add_rows(rows_here(dv.view()), sums.view(here, sizes.head_dim, sizes.value_dim));
      }
    }
  }

  static void add_to(std::optional<Tensor>& sums, const TensorView& part) {
    if (sums) {
      add_rows(part, *sums);
    } else {
      sums = as_type(part, DType::f64);
    }
  }

  // Gathered keys have this rank's own rows among them.
  void keep_own() {
    for (const Rows& run : gradients_.runs()) {
      add_own(run, gradients_);
    }
  }

  void store() {
    for (std::size_t n = 0; n < query_sums_.size() && run_.dq; ++n) {
      const Segment& segment = work_.segments[n];
      if (segment.tiles != 1) {
        const TensorView target = run_.dq->slice(2, segment.first, segment.first + segment.rows.count());
        copy_rows(query_sums_[n] ? query_sums_[n]->view() : Tensor(target.sizes(), DType::f64).view(), target);
      }
    }
    for (const Rows& rows : key_sums_.runs()) {
      const std::int64_t first = local_row(run_.keys(), rows);
      const auto target = [&](const TensorView& view) { return view.slice(2, first, first + rows.count()); };
      if (run_.dk) {
        copy_rows(key_sums_.view(rows, 0, run_.sizes().head_dim), target(*run_.dk));
      }
      if (run_.dv) {
        copy_rows(key_sums_.view(rows, run_.sizes().head_dim, run_.sizes().value_dim), target(*run_.dv));
      }
    }
  }

  const BackwardRun& run_;
  Whole whole_;
  KeyTraffic traffic_;
  RankTiles work_;
  std::optional<Tensor> wide_query_, wide_grad_out_, wide_out_;
  ConstTensorView query_, grad_out_, out_;
  std::vector<std::optional<Tensor>> query_sums_;  // [B,H,n,D] of each segment with several tiles
  RowStore key_sums_;                              // of this rank's rows, but for lone_keys()
  RowStore gradients_;  // of the rows that were received for this step, or for the one before until they are sent
  std::vector<Arriving> arriving_;
};

}  // namespace

void forward_over_keys(const ForwardRun& run) { Forward(run).run(); }
void backward_over_keys(const BackwardRun& run) { Backward(run).run(); }

std::optional<std::vector<bool>> padding_of(const Run& run, Rows queries) {
  const Problem& whole = run.whole.problem;
  if (!whole.query_lens) {
    return std::nullopt;
  }
  const std::int64_t rows = queries.count();
  std::vector<bool> padding(static_cast<std::size_t>(run.sizes().batch * rows));
  for (std::int64_t b = 0; b < whole.batch; ++b) {
    const Sequence current = sequence(whole, b);
    const Rows unreal =
        overlap({current.query_begin + current.real_queries, current.query_begin + current.query_count}, queries);
    for (std::int64_t i = unreal.begin; i < unreal.end; ++i) {
      padding[static_cast<std::size_t>((whole.packed() ? 0 : b * rows) + i - queries.begin)] = true;
    }
  }
  return padding;
}

}  // namespace headway::distributed
