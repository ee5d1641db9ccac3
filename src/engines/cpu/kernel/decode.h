// Attention for few queries against many keys ("decode"): keys in a row, features in lanes.
//
// A task is one chunk of the keys of one kv head, for all query rows that share them: the query heads of its group,
// times their queries. In blocks of up to 2048 keys
//   s [rows][keys] = Q K^T      p = 2^(s - reference)      o [rows][Dv] = p V
// K is streamed, then V: each byte is read from memory once for all rows, and memory bounds it as long as rows are few
// (one multiply-add per row and element, against 7 cycles for a cache line to arrive). Scores and sums stay in the
// second-level cache. The result of a chunk is a partial softmax for each row; decode_finish.h merges those of all
// chunks.
//
// Sums over keys are taken in steps, 16 keys, 16 such, then the block, so that long rows keep their accuracy: plain
// sums of thousands of equal terms would drift beyond the contract's bound.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/kernel/decode_block.h"
#include "engines/cpu/kernel/decode_bytes.h"
#include "engines/cpu/kernel/decode_partials.h"
#include "engines/cpu/kernel/decode_scores.h"
#include "engines/cpu/kernel/decode_softmax.h"
#include "engines/cpu/kernel/decode_task.h"
#include "engines/cpu/kernel/decode_values.h"
#include "engines/cpu/kernel/heads_ahead.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class Decode {
 public:
  Decode(const DecodeArgs& args, void* scratch) : args_(args), task_(args, stored_type<In>, scratch) {}

  static std::int64_t scratch_bytes(const DecodeArgs& args) {
    return DecodeLayout<S>(args, stored_type<In>, nullptr).bytes;
  }

  // Leaves the chunk's partial softmax of every row.
  HEADWAY_NOINLINE void run(std::int64_t chunk) {
    each_block(chunk, [&](bool first, const Range& hull) {
      if (first) {
        clear(chunk);
      }
      if (hull.begin >= hull.end) {
        return;
      }
      scores_.score_rows(hull, block_.template after_keys<In>(hull));
      soften(hull);
      values_.add(0, task_.rows, hull, nullptr, block_.template after_values<In>());
      absorb(chunk, hull);
    });
  }

  // The same for several kv heads whose 8-bit rows lie side by side, a few keys of each in turn, so that memory is read
  // in order. None has more rows than pass over a block together.
  static HEADWAY_NOINLINE void run_in_turns(Decode* const* heads, int count, std::int64_t chunk) {
    for (int h = 0; h < count; ++h) {
      heads[h]->task_.template start_rows<In>(0);
      heads[h]->clear(chunk);
    }
    const Range keys = heads[0]->keys_of(chunk);
    for (std::int64_t begin = keys.begin; begin < keys.end; begin += stream_keys) {
      const std::int64_t end = smaller(begin + stream_keys, keys.end);
      Range hulls[most_heads_in_turn], all{end, begin};
      const auto each_head = [&](const auto& body) HEADWAY_LAMBDA {
        for (int h = 0; h < count; ++h) {
          if (hulls[h].begin < hulls[h].end) {
            body(*heads[h], hulls[h]);
          }
        }
      };
      for (int h = 0; h < count; ++h) {
        hulls[h] = heads[h]->block_.enter(begin, end);
      }
      each_head([&](Decode&, const Range& hull) HEADWAY_LAMBDA {
        all = {smaller(all.begin, hull.begin), larger(all.end, hull.end)};
      });
      all.begin = begin + (all.begin - begin) / summed * summed;
      // body(head, its hull, those of a few keys that are in it, the rows to fetch beside them)
      const auto take_turns = [&](const RowSource& first, const RowSource& second, const auto& body) HEADWAY_LAMBDA {
        const auto distance = static_cast<const char*>(second.rows.data) - static_cast<const char*>(first.rows.data);
        HeadsAhead<In> ahead(first, distance, count, all);
        for (std::int64_t key = all.begin; key < all.end; key += summed) {
          for (int h = 0; h < count; ++h) {
            const Range some{larger(key, hulls[h].begin), smaller(key + summed, hulls[h].end)};
            if (some.begin < some.end) {
              body(*heads[h], hulls[h], some, ahead.beside(key, h));
            }
          }
        }
      };
      const ForwardArgs &first = heads[0]->task_.head, &second = heads[1]->task_.head;
      take_turns(first.key, second.key,
                 [](Decode& head, const Range&, const Range& some, const char* const* ahead)
                     HEADWAY_LAMBDA { head.scores_.score_turn(some, ahead); });
      each_head([](Decode& head, const Range& hull) HEADWAY_LAMBDA {
        head.soften(hull);
        head.values_.start_turns(hull);
      });
      take_turns(first.value, second.value,
                 [](Decode& head, const Range& hull, const Range& some, const char* const* ahead)
                     HEADWAY_LAMBDA { head.values_.add_turn(hull, some, ahead); });
      each_head([&](Decode& head, const Range& hull) HEADWAY_LAMBDA {
        head.values_.end_turns(hull);
        head.absorb(chunk, hull);
      });
    }
  }

  // Writes the chunk's columns of the weights: the scores again, against the merged softmax, whose factors lie where
  // the first chunk's sums were.
  HEADWAY_NOINLINE void run_weights(std::int64_t chunk) {
    const PartialSoftmaxes<S> partials(args_);
    each_block(chunk, [&](bool, const Range& hull) {
      if (hull.begin < hull.end) {
        scores_.score_rows(hull, {});
      }
      for (int r = 0; r < task_.rows; ++r) {
        if (hull.begin < hull.end) {
          softmax_.modify(r, hull);
        }
        const std::int64_t merged = partials.at(0, task_.at.numbers[r]);
        softmax_.template store_weights<In>(r, hull, partials.references[merged], partials.sums[merged]);
      }
    });
  }

 private:
  void clear(std::int64_t chunk) const {
    const PartialSoftmaxes<S> partials(args_);
    for (int r = 0; r < task_.rows; ++r) {
      partials.clear(partials.at(chunk, task_.at.numbers[r]));
    }
  }

  void soften(const Range& hull) {
    for (int r = 0; r < task_.rows; ++r) {
      softmax_.modify(r, hull);
      softmax_.soften(r, hull);
    }
  }

  void absorb(std::int64_t chunk, const Range& hull) {
    const PartialSoftmaxes<S> partials(args_);
    for (int r = 0; r < task_.rows; ++r) {
      if (task_.at.forbids[r] && !values_.output_is_finite(r)) {  // a forbidden key shows through its weight of 0
        values_.add(r, r + 1, hull, task_.at.allowed_of(r), {});
      }
      partials.absorb(partials.at(chunk, task_.at.numbers[r]), task_.at.references[r], task_.at.sums[r],
                      task_.at.outputs + r * task_.at.output_ld, task_.to_log2);
    }
  }

  Range keys_of(std::int64_t chunk) const {
    const std::int64_t begin = chunk * args_.chunk_keys;
    return {begin, smaller(begin + args_.chunk_keys, task_.head.ranges.keys)};
  }

  // body(whether these rows begin, the keys that some of them may attend to) for each block of the chunk and each set
  // of rows that passes over it together.
  template <class Body>
  HEADWAY_INLINE void each_block(std::int64_t chunk, const Body& body) {
    const Range keys = keys_of(chunk);
    for (std::int64_t row = 0; row < args_.rows();) {
      row = task_.template start_rows<In>(row);
      block_.chunk_end = keys.end;
      for (std::int64_t key = keys.begin; key < keys.end; key += stream_keys) {
        const Range hull = block_.enter(key, smaller(key + stream_keys, keys.end));
        body(key == keys.begin, hull);
      }
    }
  }

  const DecodeArgs& args_;
  static constexpr bool in_pairs = is_scaled<In> && pairs_bytes<S>;
  using Scores = std::conditional_t<in_pairs, ByteScores<S, In>, DecodeScores<S, In>>;
  using Values = std::conditional_t<in_pairs, ByteValues<S, In>, DecodeValues<S, In>>;

  DecodeTask<S> task_;                       // what is asked for, and the rows
  DecodeBlock<S> block_{task_};              // the keys at hand
  Scores scores_{task_, block_};             // s = Q K^T
  DecodeSoftmax<S> softmax_{task_, block_};  // modified scores, p, sums
  Values values_{task_, block_};             // o = p V
};

}  // namespace
}  // namespace headway::cpu
