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
  // Both sides handle forwarded rows before results, since messages between two ranks keep their order.
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
  arrived_ = {};
}

KeyTraffic::Views KeyTraffic::rows(Rows rows, bool wide) {
  wide = wide && run_.accumulator() != format_.dtype;
  const DType dtype = wide ? run_.accumulator() : format_.dtype;
  const bool here = !current_.holds(rows);
  const std::int64_t begin = local_row(here ? run_.keys() : current_.runs(), rows);
  const auto part = [&](const ConstTensorView& key, const ConstTensorView& value) {
    return Views{key.slice(2, begin, begin + rows.count()), value.slice(2, begin, begin + rows.count())};
  };
  if (here && !wide) {
    return part(run_.key, run_.value);
  }
  if (!here && !wide && run_.whole.problem.packed()) {  // packed rows have their heads side by side as they are
    return columns(current_, rows);
  }
  std::optional<Plain>& plain = here ? wide_own_ : arrived_[wide ? 1 : 0];
  if (!plain) {
    plain = here ? Plain{as_type(run_.key, dtype), as_type(run_.value, dtype)} : unpacked(dtype);
  }
  return part(plain->key, plain->value);
}

KeyTraffic::Plain KeyTraffic::unpacked(DType dtype) const {
  const std::int64_t length = count(current_.runs());
  const auto rows = [&](std::int64_t width) {
    return Tensor::uninitialized({format_.batch, format_.heads, length, width}, dtype);
  };
  Plain plain{rows(run_.sizes().head_dim), rows(run_.sizes().value_dim)};
  std::int64_t at = 0;
  for (const Rows& run : current_.runs()) {
    const Views packed = columns(current_, run);
    copy_rows(packed.key, plain.key.view().slice(2, at, at + run.count()));
    copy_rows(packed.value, plain.value.view().slice(2, at, at + run.count()));
    at += run.count();
  }
  return plain;
}

}  // namespace headway::distributed
