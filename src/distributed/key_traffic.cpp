#include "distributed/key_traffic.h"

#include <algorithm>
#include <utility>

#include "distributed/row_math.h"
#include "distributed/rows.h"

namespace headway::distributed {

KeyTraffic::KeyTraffic(const Run& run)
    : run_(run),
      own_(joined(run.keys())),
      format_{run.sizes().batch, run.sizes().kv_heads, run.sizes().head_dim + run.sizes().value_dim,
              run.sizes().dtype} {
  Shard sent;
  for (const Transfer& transfer : run.schedule.transfers) {
    if (transfer.from == run.rank() && !transfer.result) {
      sent.push_back(transfer.rows);
    }
  }
  outgoing_ = RowStore(common(joined(std::move(sent)), own_), format_);  // the rest is passed on
  for (const Rows& rows : outgoing_.runs()) {
    pack(rows, outgoing_);
  }
  current_ = RowStore({}, format_);
}

void KeyTraffic::pack(Rows rows, const RowStore& store) const {
  for (const Rows& mine : run_.keys()) {  // a run may join ranges that lie apart in this rank's tensors
    const Rows here = overlap(rows, mine);
    if (here.count() > 0) {
      const std::int64_t begin = local_row(run_.keys(), here);
      const auto target = columns(store, here);
      const auto writable = [](const ConstTensorView& view) {
        return TensorView(const_cast<void*>(view.data()), view.dtype(), view.sizes(), view.strides());
      };
      copy_rows(run_.key.slice(2, begin, begin + here.count()), writable(target.key));
      copy_rows(run_.value.slice(2, begin, begin + here.count()), writable(target.value));
    }
  }
}

KeyTraffic::Views KeyTraffic::columns(const RowStore& store, Rows rows) const {
  const std::int64_t head_dim = run_.sizes().head_dim;
  return {store.view(rows, 0, head_dim), store.view(rows, head_dim, run_.sizes().value_dim)};
}

void KeyTraffic::begin(int step, std::vector<Transport::Message> sends, std::vector<Transport::Message> receives) {
  Shard arriving;
  for (const Transfer& transfer : run_.schedule.received_by(run_.rank())) {
    if (transfer.step == step + 1 && !transfer.result) {
      arriving.push_back(transfer.rows);
    }
  }
  Shard own;
  if (run_.schedule.scheme == Scheme::all_gather && step == 0) {
    const Shard needed = run_.schedule.seen.keys_of(run_.queries());
    const bool in_place =
        std::all_of(needed.begin(), needed.end(), [&](const Rows& rows) { return local_row(run_.keys(), rows) >= 0; });
    own = in_place ? Shard{} : common(needed, own_);  // gathered with the others' rows, unless all are here as they lie
  }
  Shard runs = arriving;
  runs.insert(runs.end(), own.begin(), own.end());
  next_ = RowStore(joined(std::move(runs)), format_);
  for (const Rows& rows : own) {
    pack(rows, next_);
  }
  // Rows that go on come before results, on both sides: messages between two ranks keep their order.
  std::vector<Transport::Message> rows_out, rows_in;
  for (const Transfer& transfer : run_.schedule.transfers) {
    if (transfer.step != step + 1 || transfer.result) {
      continue;
    }
    if (transfer.from == run_.rank()) {
      const RowStore& source = outgoing_.holds(transfer.rows) ? outgoing_ : current_;
      rows_out.push_back(source.message(transfer.to, transfer.rows));
    } else if (transfer.to == run_.rank()) {
      rows_in.push_back(next_.message(transfer.from, transfer.rows));
    }
  }
  rows_out.insert(rows_out.end(), sends.begin(), sends.end());
  rows_in.insert(rows_in.end(), receives.begin(), receives.end());
  run_.transport.begin(rows_out, rows_in);
}

void KeyTraffic::end() {
  run_.transport.wait();
  current_ = std::move(next_);
  wide_.reset();
}

KeyTraffic::Views KeyTraffic::rows(Rows rows, bool wide) {
  wide = wide && run_.accumulator() != format_.dtype;
  if (current_.holds(rows)) {
    if (!wide) {
      return columns(current_, rows);
    }
    if (!wide_) {
      wide_.emplace(current_.runs(), gradient_format());
      for (const Rows& run : current_.runs()) {
        copy_rows(current_.view(run), wide_->view(run));
      }
    }
    return columns(*wide_, rows);
  }
  if (wide && !wide_key_) {
    wide_key_ = as_type(run_.key, run_.accumulator());
    wide_value_ = as_type(run_.value, run_.accumulator());
  }
  const ConstTensorView key = wide ? ConstTensorView(*wide_key_) : run_.key;
  const ConstTensorView value = wide ? ConstTensorView(*wide_value_) : run_.value;
  const std::int64_t begin = local_row(run_.keys(), rows);
  return {key.slice(2, begin, begin + rows.count()), value.slice(2, begin, begin + rows.count())};
}

}  // namespace headway::distributed
