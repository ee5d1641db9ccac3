// The scores of a decode task: s [rows][keys] = Q K^T, while K streams by.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/decode_block.h"
#include "engines/cpu/kernel/decode_task.h"
#include "engines/cpu/kernel/decode_tiles.h"
#include "engines/cpu/kernel/stored_rows.h"
#include "engines/cpu/kernel/strips.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class DecodeScores {
  static constexpr int lanes = S::lanes;

 public:
  DecodeScores(const DecodeTask<S>& task, const DecodeBlock<S>& block)
      : task_(task), block_(block), at_(task.at), scaling_(task.product_scaling), head_(task.head) {}

  // Lane groups start at the hull's first key: a score's bits do not depend on its lane. `then` is what the task reads
  // after them.
  HEADWAY_NOINLINE void score_rows(const Range& hull, const Ahead& then) {
    RowsAhead<In> ahead(head_.key, head_.head_dim, hull, then);
    for (std::int64_t key = hull.begin, count = 0; key < hull.end; key += count) {
      count = DecodeBlock<S>::keys_together(head_.key, key, smaller(hull.end - key, packed_keys));
      if (!block_.reaches(key, key + count)) {
        continue;  // modify() forbids them, whatever their scores are
      }
      const StoredRows<In> keys = block_.template stored_rows<In>(head_.key, key, count, head_.head_dim);
      for (std::int64_t k = 0; k < count; k += lanes) {
        const StoredRows<In> group = keys.from(k);
        int first = 0;  // the row that is left to begin with
        if (ahead.any()) {
          first = score_fetching(key + k, group, count - 1 - k, ahead.beside(key + k, smaller(count - k, lanes)));
        }
        if (head_.head_dim > longest_dot_chain<S, In>) {
          score_rows_of<true>(first, key + k, group, count - 1 - k);
        } else {
          score_rows_of<false>(first, key + k, group, count - 1 - k);
        }
      }
    }
  }

 private:
  template <bool in_chains>
  HEADWAY_INLINE void score_rows_of(int r, std::int64_t key, const StoredRows<In>& keys, std::int64_t last) {
    if (r == 0 && task_.rows >= 4) {
      r = score_group<4, in_chains, KeysIn::memory>(0, 4, key, keys, last);
    }
    if (r + 4 <= task_.rows) {  // a call that finds none costs a twentieth of a row of 64
      r = score_group<4, in_chains, KeysIn::cache>(r, task_.rows, key, keys, last);
    }
    if (r + 2 <= task_.rows) {
      r = score_group<2, in_chains, KeysIn::memory>(r, task_.rows, key, keys, last);
    }
    if (r < task_.rows) {
      score_group<1, in_chains, KeysIn::memory>(r, task_.rows, key, keys, last);
    }
  }

  // As many of the rows [r, end) as come in sets of NR; gives the first that is left. Each kind is a function of its
  // own: two loops in one cost the common one registers.
  template <int NR, bool in_chains, KeysIn place>
  HEADWAY_NOINLINE int score_group(int r, int end, std::int64_t key, const StoredRows<In>& keys, std::int64_t last) {
    if constexpr (NR == 1 || lanes % NR == 0) {
      for (; r + NR <= end; r += NR) {
        score_tile<NR, in_chains, place>(r, key, keys, last, FetchNothing{});
      }
    }
    return r;
  }

  // The first few rows, which wait for memory, with rows ahead fetched beside them; gives how many.
  HEADWAY_NOINLINE int score_fetching(std::int64_t key, const StoredRows<In>& keys, std::int64_t last,
                                      const Ahead& ahead) {
    const bool in_chains = head_.head_dim > longest_dot_chain<S, In>;
    const auto score = [&]<int NR>(Strip<NR>) {
      in_chains ? score_tile<NR, true, KeysIn::memory>(0, key, keys, last, FetchRows{ahead})
                : score_tile<NR, false, KeysIn::memory>(0, key, keys, last, FetchRows{ahead});
      return NR;
    };
    if constexpr (lanes % 4 == 0) {
      if (task_.rows >= 4) {
        return score(Strip<4>{});
      }
    }
    return score(Strip<1>{});
  }

  template <int NR, bool in_chains, KeysIn place, class Fetch>
  HEADWAY_INLINE void score_tile(int r, std::int64_t key, const StoredRows<In>& keys, std::int64_t last,
                                 const Fetch& fetch) {
    dot_tile<S, In, NR, in_chains, place>(at_.queries + r * at_.query_ld, at_.query_ld, keys, last, head_.head_dim,
                                          scaling_, at_.scores_of(r) + (key - block_.begin), at_.score_ld, fetch);
  }

  const DecodeTask<S>& task_;
  const DecodeBlock<S>& block_;
  const DecodeLayout<S> at_;
  const Scaling<S> scaling_;
  const ForwardArgs& head_;
};

}  // namespace
}  // namespace headway::cpu
