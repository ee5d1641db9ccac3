// Queries move, keys stay (pass_query): a few queries go to the ranks whose keys they see, each computes its part, and
// partial rows with their statistics come back to be merged, in the accumulator's type.
#include <vector>

#include "distributed/row_math.h"
#include "distributed/rows.h"
#include "distributed/run.h"

namespace headway::distributed {
namespace {

class QueryPass {
 public:
  explicit QueryPass(const ForwardRun& run)
      : run_(run), whole_(run.without_sinks()), tiles_(run.schedule.tiles(run.rank())) {
    if (run.accumulator() != run.sizes().dtype) {
      wide_key_ = as_type(run.key, run.accumulator());
      wide_value_ = as_type(run.value, run.accumulator());
    }
    std::int64_t first = 0;
    for (const Rows& rows : run.queries()) {
      merges_.emplace_back(sizes().batch, sizes().heads, rows.count(), sizes().value_dim);
      firsts_.push_back(first);
      first += rows.count();
    }
  }

  void run() {
    send_queries();
    const Tensor own = as_type(run_.query, run_.accumulator());  // computed while the queries travel
    for (const Tile& tile : tiles_) {
      if (tile.step == 0) {
        const std::int64_t first = local_row(run_.queries(), tile.queries);
        add(tile, own.view().slice(2, first, first + tile.queries.count()), merge_of(tile.queries), 0);
      }
    }
    run_.transport.wait();
    compute_visitors();
    send_partials();
    finish();
  }

 private:
  const Sizes& sizes() const { return run_.sizes(); }
  RowFormat query_format() const { return {sizes().batch, sizes().heads, sizes().head_dim, sizes().dtype}; }
  RowFormat partial_format() const { return {sizes().batch, sizes().heads, sizes().value_dim + 1, run_.accumulator()}; }

  template <class Visit>
  void each_transfer(bool result, const Visit& visit) const {
    for (const Transfer& transfer : run_.schedule.transfers) {
      if (transfer.result == result) {
        visit(transfer);
      }
    }
  }

  RowMerge& merge_of(Rows queries) { return merges_[index_of(queries)]; }
  std::size_t index_of(Rows queries) const {
    std::size_t index = 0;
    while (overlap(run_.queries()[index], queries).count() < queries.count()) {
      ++index;
    }
    return index;
  }

  void send_queries() {
    std::vector<Transport::Message> sends, receives;
    Shard visiting;
    each_transfer(false, [&](const Transfer& transfer) {
      if (transfer.from == run_.rank()) {
        const RowStore packed({transfer.rows}, query_format());
        for (const Rows& mine : run_.queries()) {
          if (const Rows here = overlap(mine, transfer.rows); here.count() > 0) {
            const std::int64_t first = local_row(run_.queries(), here);
            copy_rows(run_.query.slice(2, first, first + here.count()), packed.view(here));
          }
        }
        sends.push_back(packed.message(transfer.to, transfer.rows));
      } else if (transfer.to == run_.rank()) {
        visiting.push_back(transfer.rows);
      }
    });
    visitors_ = RowStore(joined(std::move(visiting)), query_format());
    each_transfer(false, [&](const Transfer& transfer) {
      if (transfer.to == run_.rank()) {
        receives.push_back(visitors_.message(transfer.from, transfer.rows));
      }
    });
    run_.transport.begin(sends, receives);
  }

  void add(const Tile& tile, ConstTensorView query, RowMerge& merge, std::int64_t first_row) {
    const std::int64_t first = local_row(run_.keys(), tile.keys), last = first + tile.keys.count();
    const ConstTensorView key = wide_key_ ? ConstTensorView(*wide_key_) : run_.key;
    const ConstTensorView value = wide_value_ ? ConstTensorView(*wide_value_) : run_.value;
    const Part part{tile.queries, tile.keys, 0, query, key.slice(2, first, last), value.slice(2, first, last)};
    const std::int64_t rows = tile.queries.count();
    Tensor out = Tensor::uninitialized({sizes().batch, sizes().heads, rows, sizes().value_dim}, run_.accumulator());
    Tensor lse = Tensor::uninitialized({sizes().batch, sizes().heads, rows}, run_.accumulator());
    forward_part_of_rows(whole_, part, out, lse);
    merge.add(out, lse, first_row);
  }

  // Tiles of step 1 have whole runs of visiting queries.
  void compute_visitors() {
    partials_ = RowStore(visitors_.runs(), partial_format());
    for (const Rows& rows : visitors_.runs()) {
      RowMerge merge(sizes().batch, sizes().heads, rows.count(), sizes().value_dim);
      const Tensor query = as_type(visitors_.view(rows), run_.accumulator());
      for (const Tile& tile : tiles_) {
        if (tile.step == 1 && tile.queries == rows) {
          add(tile, query, merge, 0);
        }
      }
      merge.store_part(partials_.view(rows, 0, sizes().value_dim),
                       partials_.view(rows, sizes().value_dim, 1).select(3, 0));
    }
  }

  void send_partials() {
    std::vector<Transport::Message> sends, receives;
    std::vector<RowStore> arriving;
    std::vector<Rows> rows;
    each_transfer(true, [&](const Transfer& transfer) {
      if (transfer.from == run_.rank()) {
        sends.push_back(partials_.message(transfer.to, transfer.rows));
      } else if (transfer.to == run_.rank()) {
        arriving.emplace_back(Shard{transfer.rows}, partial_format());
        rows.push_back(transfer.rows);
        receives.push_back(arriving.back().message(transfer.from, transfer.rows));
      }
    });
    run_.transport.begin(sends, receives);
    run_.transport.wait();
    for (std::size_t n = 0; n < arriving.size(); ++n) {  // in the schedule's order
      for (const Rows& mine : run_.queries()) {
        if (const Rows here = overlap(mine, rows[n]); here.count() > 0) {
          merge_of(here).add(arriving[n].view(here, 0, sizes().value_dim),
                             arriving[n].view(here, sizes().value_dim, 1).select(3, 0), here.begin - mine.begin);
        }
      }
    }
  }

  void finish() {
    for (std::size_t n = 0; n < merges_.size(); ++n) {
      const Rows rows = run_.queries()[n];
      const auto padding = padding_of(run_, rows);
      const std::int64_t last = firsts_[n] + rows.count();
      merges_[n].finish(run_.whole.problem.sinks, padding ? &*padding : nullptr, run_.out.slice(2, firsts_[n], last),
                        run_.lse.slice(2, firsts_[n], last));
    }
  }

  const ForwardRun& run_;
  Whole whole_;
  std::vector<Tile> tiles_;
  std::optional<Tensor> wide_key_, wide_value_;
  std::vector<RowMerge> merges_;  // of each range of this rank's queries
  std::vector<std::int64_t> firsts_;
  RowStore visitors_, partials_;
};

}  // namespace

void forward_over_queries(const ForwardRun& run) { QueryPass(run).run(); }

}  // namespace headway::distributed
