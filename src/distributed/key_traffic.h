// The transfers of keys and values in ring and all_gather: packs the rows that others need of this rank, receives the
// next step's rows while this step's are read, and passes them on.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "distributed/run.h"

namespace headway::distributed {

class KeyTraffic {
 public:
  explicit KeyTraffic(const Run& run);

  // Starts the transfers of step + 1, and the given other messages with them.
  void begin(int step, std::vector<Transport::Message> sends = {}, std::vector<Transport::Message> receives = {});
  // Waits for them; then the rows of step + 1 have arrived.
  void end();

  struct Views {
    ConstTensorView key, value;  // [B,Hkv,n,D], [B,Hkv,n,Dv]
  };
  // Rows of this step, in the type of the inputs or in the accumulator's.
  Views rows(Rows rows, bool wide);

  // The rows of this step that were received (or gathered).
  const Shard& runs() const { return current_.runs(); }
  RowFormat gradient_format() const { return {format_.batch, format_.heads, format_.width, run_.accumulator()}; }

 private:
  // [B,Hkv,n,D] and [B,Hkv,n,Dv], contiguous: an engine reads keys many times, and packed rows are far apart in memory.
  struct Plain {
    Tensor key, value;
  };
  Plain unpacked(DType dtype) const;  // current_

  Views columns(const RowStore& store, Rows rows) const;
  void pack(Rows rows, const RowStore& store) const;  // this rank's rows, as a run or part of one

  const Run& run_;
  Shard own_;  // this rank's rows, in order
  RowFormat format_;
  RowStore outgoing_;        // this rank's rows that others need
  RowStore current_, next_;  // of this step, and of the next
  std::array<std::optional<Plain>, 2>
      arrived_;                    // current_ in the inputs' type and in the accumulator's, once asked for
  std::optional<Plain> wide_own_;  // this rank's rows in the accumulator's type
};

}  // namespace headway::distributed
