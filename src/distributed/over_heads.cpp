// Heads move (all-to-all) inside a group of ranks: every rank receives its heads of the group's rows, computes them,
// and returns rows of the result to their owners. In scheme heads all ranks are one group, nothing is merged, and the
// result has the bits of a single process; in hybrid a ring of the ranks with the same heads combines the groups.
#include <vector>

#include "distributed/row_math.h"
#include "distributed/run.h"

namespace headway::distributed {
namespace {

// A tensor of which this rank holds some rows of all heads, and then the group's rows of some heads, or the other way
// round.
class Turned {
 public:
  // `heads` are the query heads or the kv heads, of `width` columns each.
  Turned(const Run& run, const std::vector<Shard>& of_ranks, const Shard& of_group, std::int64_t heads,
         std::int64_t width, DType dtype)
      : run_(run),
        group_(group_of(run.schedule, run.rank())),
        of_ranks_(of_ranks),
        heads_(heads),
        width_(width),
        dtype_(dtype),
        all_(of_group, format(run.rank())) {}

  // [B,own heads,the group's rows,width], in the order of the sequence.
  TensorView all() const { return all_.view(); }

  // This rank's rows: its own heads stay, the others are sent; the other ranks' rows of its heads are received.
  void begin_out(ConstTensorView mine, std::vector<Transport::Message>& sends,
                 std::vector<Transport::Message>& receives) {
    for (int peer = group_.first; peer < group_.first + group_.size; ++peer) {
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
        for (const Rows& rows : of_ranks_[static_cast<std::size_t>(peer)]) {
          receives.push_back(all_.message(peer, rows));
        }
      }
    }
  }

  // The way back: rows of the heads computed here go to their owners, this rank's rows of all heads arrive.
  void begin_home(std::vector<Transport::Message>& sends, std::vector<Transport::Message>& receives) {
    home_.clear();
    for (int peer = group_.first; peer < group_.first + group_.size; ++peer) {
      home_.emplace_back(peer == run_.rank() ? all_ : RowStore(own(), format(peer)));
      if (peer == run_.rank()) {
        continue;
      }
      for (const Rows& rows : of_ranks_[static_cast<std::size_t>(peer)]) {
        sends.push_back(all_.message(peer, rows));
      }
      for (const Rows& rows : own()) {
        receives.push_back(home_.back().message(peer, rows));
      }
    }
  }
  void store(TensorView mine) const {
    for (std::size_t n = 0; n < home_.size(); ++n) {
      const Rows heads = heads_of(group_.first + static_cast<int>(n));
      const TensorView part = mine.slice(1, heads.begin, heads.end);
      std::int64_t first = 0;
      for (const Rows& rows : own()) {
        copy_rows(home_[n].view(rows), part.slice(2, first, first + rows.count()));
        first += rows.count();
      }
    }
  }

 private:
  const Shard& own() const { return of_ranks_[static_cast<std::size_t>(run_.rank())]; }
  Rows heads_of(int rank) const {
    const HeadShare share = distributed::heads_of(run_.schedule, rank);
    return heads_ == run_.sizes().heads ? share.heads : share.kv_heads;
  }
  RowFormat format(int rank) const { return {run_.sizes().batch, heads_of(rank).count(), width_, dtype_}; }

  const Run& run_;
  RankGroup group_;
  const std::vector<Shard>& of_ranks_;
  std::int64_t heads_, width_;
  DType dtype_;
  RowStore all_;                // the group's rows of this rank's heads
  std::vector<RowStore> home_;  // this rank's rows of the heads of each rank of the group
};

// The ranks of all groups that have this rank's heads, as the ranks of the ring.
class RingTransport : public Transport {
 public:
  explicit RingTransport(const Run& run)
      : whole_(run.transport), group_(run.schedule.group), member_(run.rank() % run.schedule.group) {}

  int rank() const override { return whole_.rank() / group_; }
  int ranks() const override { return whole_.ranks() / group_; }
  void begin(std::span<const Message> sends, std::span<const Message> receives) override {
    whole_.begin(with_ranks(sends), with_ranks(receives));
  }
  void wait() override { whole_.wait(); }
  void progress() override { whole_.progress(); }
  std::vector<std::string> all_gather(const std::string& text) override {
    const std::vector<std::string> all = whole_.all_gather(text);
    std::vector<std::string> mine;
    for (int group = 0; group < ranks(); ++group) {
      mine.push_back(all[static_cast<std::size_t>(group * group_ + member_)]);
    }
    return mine;
  }

 private:
  std::vector<Message> with_ranks(std::span<const Message> messages) const {
    std::vector<Message> result(messages.begin(), messages.end());
    for (Message& message : result) {
      message.peer = message.peer * group_ + member_;
    }
    return result;
  }

  Transport& whole_;
  int group_, member_;
};

// The computation of this rank after its heads have arrived.
struct HeadsCall {
  explicit HeadsCall(const Run& run)
      : share(heads_of(run.schedule, run.rank())),
        whole(run.whole.of_heads(share.heads, share.kv_heads)),
        transport(run),
        ring(run.schedule.ring ? *run.schedule.ring : Schedule{}) {
    ring.sizes.heads = share.heads.count();
    ring.sizes.kv_heads = share.kv_heads.count();
    const auto group = static_cast<std::size_t>(transport.rank());
    rows_q = run.schedule.ring ? ring.sharding.queries[group] : Shard{{0, run.sizes().queries}};
    rows_k = run.schedule.ring ? ring.sharding.keys[group] : Shard{{0, run.sizes().keys}};
  }

  Turned queries(const Run& run, std::int64_t width, DType dtype) const {
    return {run, run.schedule.sharding.queries, rows_q, run.sizes().heads, width, dtype};
  }
  Turned keys(const Run& run, std::int64_t width) const {
    return {run, run.schedule.sharding.keys, rows_k, run.sizes().kv_heads, width, run.sizes().dtype};
  }
  Run on_ring(ConstTensorView query, ConstTensorView key, ConstTensorView value) {
    return {transport, ring, whole, query, key, value};
  }

  HeadShare share;
  Whole whole;
  RingTransport transport;
  Schedule ring;         // hybrid: with this rank's heads
  Shard rows_q, rows_k;  // of the group
};

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
  HeadsCall call(run);
  Turned query = call.queries(run, sizes.head_dim, sizes.dtype), out = call.queries(run, sizes.value_dim, sizes.dtype);
  Turned key = call.keys(run, sizes.head_dim), value = call.keys(run, sizes.value_dim);
  Turned lse = call.queries(run, 1, run.accumulator());
  Messages messages;
  query.begin_out(run.query, messages.sends, messages.receives);
  key.begin_out(run.key, messages.sends, messages.receives);
  value.begin_out(run.value, messages.sends, messages.receives);
  messages.exchange(run.transport);
  if (run.schedule.ring) {
    forward_over_keys({call.on_ring(query.all(), key.all(), value.all()), out.all(), lse.all().select(3, 0)});
  } else {
    const Part all = {{0, sizes.queries}, {0, sizes.keys}, 0, query.all(), key.all(), value.all()};
    forward_part(call.whole, all, out.all(), lse.all().select(3, 0));
  }
  out.begin_home(messages.sends, messages.receives);
  lse.begin_home(messages.sends, messages.receives);
  messages.exchange(run.transport);
  out.store(run.out);
  lse.store(run.lse.unsqueeze(3));
}

void backward_over_heads(const BackwardRun& run) {
  const Sizes& sizes = run.sizes();
  HeadsCall call(run);
  Turned query = call.queries(run, sizes.head_dim, sizes.dtype), dq = call.queries(run, sizes.head_dim, sizes.dtype);
  Turned out = call.queries(run, sizes.value_dim, sizes.dtype);
  Turned grad_out = call.queries(run, sizes.value_dim, sizes.dtype);
  Turned key = call.keys(run, sizes.head_dim), dk = call.keys(run, sizes.head_dim);
  Turned value = call.keys(run, sizes.value_dim), dv = call.keys(run, sizes.value_dim);
  Turned lse = call.queries(run, 1, run.accumulator());
  Messages messages;
  query.begin_out(run.query, messages.sends, messages.receives);
  key.begin_out(run.key, messages.sends, messages.receives);
  value.begin_out(run.value, messages.sends, messages.receives);
  out.begin_out(run.out, messages.sends, messages.receives);
  grad_out.begin_out(run.grad_out, messages.sends, messages.receives);
  lse.begin_out(run.lse.unsqueeze(3), messages.sends, messages.receives);
  messages.exchange(run.transport);
  std::optional<TensorView> bias_sums = run.bias_sums;
  if (bias_sums && bias_sums->size(1) != 1) {
    bias_sums = bias_sums->slice(1, call.share.heads.begin, call.share.heads.end);
  }
  if (run.schedule.ring) {
    backward_over_keys({call.on_ring(query.all(), key.all(), value.all()), grad_out.all(), out.all(),
                        lse.all().select(3, 0), dq.all(), dk.all(), dv.all(), bias_sums});
  } else {
    const Part all = {{0, sizes.queries}, {0, sizes.keys}, 0, query.all(), key.all(), value.all()};
    backward_part(call.whole, all, grad_out.all(), out.all(), lse.all().select(3, 0),
                  {dq.all(), dk.all(), dv.all(), bias_sums});
  }
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
