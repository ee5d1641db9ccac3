// Keys and values move, queries stay (ring, all_gather). Each step computes the tiles whose keys have arrived, while
// the next step's keys are on their way.
#include <algorithm>

#include "core/elements.h"
#include "core/key_range.h"
#include "distributed/key_traffic.h"
#include "distributed/row_math.h"
#include "distributed/rows.h"

namespace headway::distributed {
namespace {

// A range of this rank's queries.
struct QueryBlock {
  Rows rows;
  std::int64_t first = 0;  // of this rank's rows
  int tiles = 0;
  std::optional<RowMerge> merge = {};
  std::optional<Tensor> wide_query = {};  // in the accumulator's type, where that is another
};

template <class View>
View rows_of(const View& view, const QueryBlock& block) {
  return view.slice(2, block.first, block.first + block.rows.count());
}

class Forward {
 public:
  explicit Forward(const ForwardRun& run)
      : run_(run), merged_(run.without_sinks()), traffic_(run), tiles_(run.schedule.tiles(run.rank())) {
    std::int64_t first = 0;
    for (const Rows& rows : run.queries()) {
      QueryBlock block{.rows = rows, .first = first};
      block.tiles = static_cast<int>(
          std::count_if(tiles_.begin(), tiles_.end(), [&](const Tile& tile) { return tile.queries == rows; }));
      blocks_.push_back(std::move(block));
      first += rows.count();
    }
  }

  void run() {
    for (int step = 0; step < run_.schedule.steps; ++step) {
      traffic_.begin(step);
      for (const Tile& tile : tiles_) {
        if (tile.step == step) {
          compute(block_of(tile), tile);
        }
      }
      traffic_.end();
    }
    for (QueryBlock& block : blocks_) {
      if (block.tiles != 1) {
        finish(block);
      }
    }
  }

 private:
  QueryBlock& block_of(const Tile& tile) {
    return *std::find_if(blocks_.begin(), blocks_.end(), [&](const QueryBlock& b) { return b.rows == tile.queries; });
  }

  RowMerge& merge_of(QueryBlock& block) {
    if (!block.merge) {
      const Sizes& sizes = run_.sizes();
      block.merge.emplace(sizes.batch, sizes.heads, block.rows.count(), sizes.value_dim);
    }
    return *block.merge;
  }

  void compute(QueryBlock& block, const Tile& tile) {
    const bool alone = block.tiles == 1;  // all keys of the block in one call: nothing to merge, no wider type
    const KeyTraffic::Views keys = traffic_.rows(tile.keys, !alone);
    Part part{tile.queries, tile.keys, block.first, rows_of(run_.query, block), keys.key, keys.value};
    if (alone) {
      forward_part(run_.whole, part, rows_of(run_.out, block), rows_of(run_.lse, block));
      return;
    }
    if (run_.accumulator() != run_.sizes().dtype) {
      if (!block.wide_query) {
        block.wide_query = as_type(part.query, run_.accumulator());
      }
      part.query = *block.wide_query;
    }
    const Sizes& sizes = run_.sizes();
    Tensor out =
        Tensor::uninitialized({sizes.batch, sizes.heads, block.rows.count(), sizes.value_dim}, run_.accumulator());
    Tensor lse = Tensor::uninitialized({sizes.batch, sizes.heads, block.rows.count()}, run_.accumulator());
    forward_part(merged_, part, out, lse);
    merge_of(block).add(out, lse);
  }

  void finish(QueryBlock& block) {
    const auto padding = padding_of(run_, block.rows);
    merge_of(block).finish(run_.whole.problem.sinks, padding ? &*padding : nullptr, rows_of(run_.out, block),
                           rows_of(run_.lse, block));
  }

  const ForwardRun& run_;
  Whole merged_;  // the sink is added once, at the end
  KeyTraffic traffic_;
  std::vector<Tile> tiles_;
  std::vector<QueryBlock> blocks_;
};

class Backward {
 public:
  explicit Backward(const BackwardRun& run)
      : run_(run),
        whole_(run.without_sinks()),  // their part is in lse
        traffic_(run),
        tiles_(run.schedule.tiles(run.rank())),
        query_(wide(run.query, wide_query_)),
        grad_out_(wide(run.grad_out, wide_grad_out_)),
        out_(wide(run.out, wide_out_)),
        query_sums_(run.query.sizes(), DType::f64),
        key_sums_(run.keys(), sums_format(), true) {}

  void run() {
    for (int step = 0; step < run_.schedule.steps; ++step) {
      begin(step);
      for (const Tile& tile : tiles_) {
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
    for (const Rows& mine : run_.keys()) {
      if (const Rows here = overlap(mine, rows); here.count() > 0) {
        add_rows(from.view(here), key_sums_.view(here));
      }
    }
  }

  void compute(const Tile& tile) {
    const Sizes& sizes = run_.sizes();
    const std::int64_t begin = local_row(run_.queries(), tile.queries), end = begin + tile.queries.count();
    const auto rows = [&](const auto& view) { return view.slice(2, begin, end); };
    const KeyTraffic::Views keys = traffic_.rows(tile.keys, true);
    const Part part{tile.queries, tile.keys, begin, rows(query_), keys.key, keys.value};
    const auto fresh = [&](std::int64_t heads, std::int64_t count, std::int64_t width) {
      return Tensor::uninitialized({sizes.batch, heads, count, width}, run_.accumulator());
    };
    Tensor dq = fresh(sizes.heads, tile.queries.count(), sizes.head_dim);
    Tensor dk = fresh(sizes.kv_heads, tile.keys.count(), sizes.head_dim);
    Tensor dv = fresh(sizes.kv_heads, tile.keys.count(), sizes.value_dim);
    backward_part(whole_, part, rows(grad_out_), rows(out_), rows(run_.lse), {dq, dk, dv});
    add_rows(dq, rows(query_sums_.view()));
    const RowStore& sums = gradients_.holds(tile.keys) ? gradients_ : key_sums_;
    add_rows(dk, sums.view(tile.keys, 0, sizes.head_dim));
    add_rows(dv, sums.view(tile.keys, sizes.head_dim, sizes.value_dim));
  }

  // Gathered keys have this rank's own rows among them.
  void keep_own() {
    for (const Rows& run : gradients_.runs()) {
      add_own(run, gradients_);
    }
  }

  void store() {
    if (run_.dq) {
      copy_rows(query_sums_, *run_.dq);
    }
    std::int64_t first = 0;
    for (const Rows& rows : run_.keys()) {
      const auto target = [&](const TensorView& view) { return view.slice(2, first, first + rows.count()); };
      if (run_.dk) {
        copy_rows(key_sums_.view(rows, 0, run_.sizes().head_dim), target(*run_.dk));
      }
      if (run_.dv) {
        copy_rows(key_sums_.view(rows, run_.sizes().head_dim, run_.sizes().value_dim), target(*run_.dv));
      }
      first += rows.count();
    }
  }

  const BackwardRun& run_;
  Whole whole_;
  KeyTraffic traffic_;
  std::vector<Tile> tiles_;
  std::optional<Tensor> wide_query_, wide_grad_out_, wide_out_;
  ConstTensorView query_, grad_out_, out_;
  Tensor query_sums_;   // [B,H,n,D]
  RowStore key_sums_;   // of this rank's rows
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
