// Rows of the whole sequence in this rank's memory, [row][B][heads][width]: any run of rows is sent without packing.
#pragma once

#include <algorithm>
#include <memory>

#include "headway/distributed.h"

namespace headway::distributed {

// The number of rows before these in the consecutive ranges of a shard; -1 for rows that are not inside one range.
inline std::int64_t local_row(const Shard& shard, Rows rows) {
  std::int64_t at = 0;
  for (const Rows& mine : shard) {
    if (mine.begin <= rows.begin && rows.end <= mine.end) {
      return at + rows.begin - mine.begin;
    }
    at += mine.count();
  }
  return -1;
}

struct RowFormat {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t width = 0;
  DType dtype = DType::f32;

  std::int64_t elements() const { return batch * heads * width; }
  std::size_t bytes() const { return static_cast<std::size_t>(elements()) * size_of(dtype); }
};

class RowStore {
 public:
  RowStore() = default;
  // Runs without overlap. Uninitialised, unless zeros are requested.
  RowStore(Shard runs, const RowFormat& format, bool zeros = false) : runs_(std::move(runs)), format_(format) {
    const Dims sizes = {count(runs_), format.batch, format.heads, format.width};
    memory_ =
        std::make_shared<Tensor>(zeros ? Tensor(sizes, format.dtype) : Tensor::uninitialized(sizes, format.dtype));
  }

  const Shard& runs() const { return runs_; }

  bool holds(Rows rows) const { return local_row(runs_, rows) >= 0; }

  // Some columns of rows inside one run, as [B,heads,rows,columns].
  TensorView view(Rows rows, std::int64_t first, std::int64_t columns) const {
    const std::int64_t at = std::max<std::int64_t>(local_row(runs_, rows), 0);
    const std::int64_t head = format_.width, item = format_.heads * head, row = format_.batch * item;
    auto* data = static_cast<std::byte*>(memory_->data());
    if (data != nullptr) {
      data += static_cast<std::size_t>(at * row + first) * size_of(format_.dtype);
    }
    return {data, format_.dtype, {format_.batch, format_.heads, rows.count(), columns}, {item, head, row, 1}};
  }
  TensorView view(Rows rows) const { return view(rows, 0, format_.width); }
  // All rows, run after run.
  TensorView view() const {
    const std::int64_t head = format_.width, item = format_.heads * head, row = format_.batch * item;
    return {memory_->data(), format_.dtype, {format_.batch, format_.heads, count(runs_), head}, {item, head, row, 1}};
  }

  // Rows inside one run as a message to or from a peer.
  Transport::Message message(int peer, Rows rows) const {
    auto* data = static_cast<std::byte*>(memory_->data());
    if (data != nullptr) {
      data += static_cast<std::size_t>(local_row(runs_, rows)) * format_.bytes();
    }
    return {peer, data, static_cast<std::size_t>(rows.count()) * format_.bytes(), memory_};
  }

 private:
  Shard runs_;
  RowFormat format_;
  std::shared_ptr<Tensor> memory_;
};

}  // namespace headway::distributed
