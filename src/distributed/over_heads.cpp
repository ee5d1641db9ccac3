// Heads move (all-to-all): every rank receives its heads of the whole sequence, computes them in one call, and sends
// rows of the result home. Nothing is merged, so the result has the bits of a single process.
#include <vector>

#include "distributed/row_math.h"
#include "distributed/run.h"

namespace headway::distributed {
namespace {

// A tensor of which this rank holds some rows of all heads, and then all rows of some heads, or the other way round.
class Turned {
 public:
  // `width` columns for each of `per_kv_head` heads of a kv head.
  Turned(const Run& run, const std::vector<Shard>& shards, std::int64_t length, std::int64_t heads, std::int64_t width,
         DType dtype)
      : run_(run),
        shards_(shards),
        heads_(heads),
        width_(width),
        dtype_(dtype),
        all_(whole(length), format(run.rank())) {}

  TensorView all() const { return all_.view({0, count(all_.runs())}); }

  // This rank's rows: its own heads stay, the others are sent; the other ranks' rows of its heads are received.
  void begin_out(ConstTensorView mine, std::vector<Transport::Message>& sends,
                 std::vector<Transport::Message>& receives) {
    for (int peer = 0; peer < run_.schedule.ranks(); ++peer) {
      const ConstTensorView part = mine.slice(1, heads_of(peer).begin, heads_of(peer).end);
      std::int64_t first = 0;
      const RowStore packed = peer == run_.rank() ? all_ : RowStore(own(), format(peer));
      for (const Rows& rows : own()) {
        copy_rows(part.slice(2, first, first + rows.count()), packed.view(rows));
        first += rows.count();
        if (peer != run_.rank()) {
          sends.push_back(packed.message(peer, rows));
        }
      }
      if (peer != run_.rank()) {
        for (const Rows& rows : shards_[static_cast<std::size_t>(peer)]) {
          receives.push_back(all_.message(peer, rows));
        }
      }
    }
  }

  // The way back: rows of the heads computed here go to their owners, this rank's rows of all heads arrive.
  void begin_home(std::vector<Transport::Message>& sends, std::vector<Transport::Message>& receives) {
    home_.clear();
    for (int peer = 0; peer < run_.schedule.ranks(); ++peer) {
      home_.emplace_back(peer == run_.rank() ? all_ : RowStore(own(), format(peer)));
      if (peer == run_.rank()) {
        continue;
      }
      for (const Rows& rows : shards_[static_cast<std::size_t>(peer)]) {
        sends.push_back(all_.message(peer, rows));
      }
      for (const Rows& rows : own()) {
        receives.push_back(home_.back().message(peer, rows));
      }
    }
  }
  void store(TensorView mine) const {
    for (int peer = 0; peer < run_.schedule.ranks(); ++peer) {
      const TensorView part = mine.slice(1, heads_of(peer).begin, heads_of(peer).end);
      std::int64_t first = 0;
      for (const Rows& rows : own()) {
        copy_rows(home_[static_cast<std::size_t>(peer)].view(rows), part.slice(2, first, first + rows.count()));
        first += rows.count();
      }
    }
  }

 private:
  static Shard whole(std::int64_t length) { return {{0, length}}; }
  const Shard& own() const { return shards_[static_cast<std::size_t>(run_.rank())]; }
  Rows heads_of(int rank) const {
    const HeadGroup group = head_group(run_.sizes(), run_.schedule.ranks(), rank);
    return heads_ == run_.sizes().heads ? group.heads : group.kv_heads;
  }
  RowFormat format(int rank) const { return {run_.sizes().batch, heads_of(rank).count(), width_, dtype_}; }

  const Run& run_;
  const std::vector<Shard>& shards_;
  std::int64_t heads_, width_;
  DType dtype_;
  RowStore all_;                // all rows of this rank's heads
  std::vector<RowStore> home_;  // this rank's rows of each rank's heads
};

// The tensors of the queries' or the keys' side.
Turned queries(const Run& run, std::int64_t width, DType dtype) {
  return {run, run.schedule.sharding.queries, run.sizes().queries, run.sizes().heads, width, dtype};
}
Turned keys(const Run& run, std::int64_t width) {
  return {run, run.schedule.sharding.keys, run.sizes().keys, run.sizes().kv_heads, width, run.sizes().dtype};
}

Whole own_heads(const Run& run) {
  const HeadGroup group = head_group(run.sizes(), run.schedule.ranks(), run.rank());
  return run.whole.of_heads(group.heads, group.kv_heads);
}

struct Messages {
  std::vector<Transport::Message> sends, receives;
  void exchange(Transport& transport) {
    transport.begin(sends, receives);
    transport.wait();
    sends.clear();
    receives.clear();
  }
};

}  // namespace

void forward_over_heads(const ForwardRun& run) {
  const Sizes& sizes = run.sizes();
  Turned query = queries(run, sizes.head_dim, sizes.dtype), out = queries(run, sizes.value_dim, sizes.dtype);
  Turned key = keys(run, sizes.head_dim), value = keys(run, sizes.value_dim);
  Turned lse = queries(run, 1, run.accumulator());
  Messages messages;
  query.begin_out(run.query, messages.sends, messages.receives);
  key.begin_out(run.key, messages.sends, messages.receives);
  value.begin_out(run.value, messages.sends, messages.receives);
  messages.exchange(run.transport);
  const Part all = {{0, sizes.queries}, {0, sizes.keys}, 0, query.all(), key.all(), value.all()};
  forward_part(own_heads(run), all, out.all(), lse.all().select(3, 0));
  out.begin_home(messages.sends, messages.receives);
  lse.begin_home(messages.sends, messages.receives);
  messages.exchange(run.transport);
  out.store(run.out);
  lse.store(run.lse.unsqueeze(3));
}

void backward_over_heads(const BackwardRun& run) {
  const Sizes& sizes = run.sizes();
  Turned query = queries(run, sizes.head_dim, sizes.dtype), dq = queries(run, sizes.head_dim, sizes.dtype);
  Turned out = queries(run, sizes.value_dim, sizes.dtype), grad_out = queries(run, sizes.value_dim, sizes.dtype);
  Turned key = keys(run, sizes.head_dim), dk = keys(run, sizes.head_dim);
  Turned value = keys(run, sizes.value_dim), dv = keys(run, sizes.value_dim);
  Turned lse = queries(run, 1, run.accumulator());
  Messages messages;
  query.begin_out(run.query, messages.sends, messages.receives);
  key.begin_out(run.key, messages.sends, messages.receives);
  value.begin_out(run.value, messages.sends, messages.receives);
  out.begin_out(run.out, messages.sends, messages.receives);
  grad_out.begin_out(run.grad_out, messages.sends, messages.receives);
  lse.begin_out(run.lse.unsqueeze(3), messages.sends, messages.receives);
  messages.exchange(run.transport);
  const Part all = {{0, sizes.queries}, {0, sizes.keys}, 0, query.all(), key.all(), value.all()};
  PartGradients gradients{dq.all(), dk.all(), dv.all(), run.bias_sums};
  if (run.bias_sums && run.bias_sums->size(1) != 1) {
    const Rows heads = head_group(sizes, run.schedule.ranks(), run.rank()).heads;
    gradients.bias_sums = run.bias_sums->slice(1, heads.begin, heads.end);
  }
  backward_part(own_heads(run), all, grad_out.all(), out.all(), lse.all().select(3, 0), gradients);
  dq.begin_home(messages.sends, messages.receives);
  dk.begin_home(messages.sends, messages.receives);
  dv.begin_home(messages.sends, messages.receives);
  messages.exchange(run.transport);
  const auto store = [](const Turned& from, const std::optional<TensorView>& to) {
    if (to) {
      from.store(*to);
    }
  };
  store(dq, run.dq);
  store(dk, run.dk);
  store(dv, run.dv);
}

}  // namespace headway::distributed
