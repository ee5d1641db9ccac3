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
    const PartialSoftmaxes<S> partials(args_);
    each_block(chunk, [&](bool first, const Range& hull) {
      for (int r = 0; first && r < task_.rows; ++r) {
        partials.clear(partials.at(chunk, task_.at.numbers[r]));
      }
      if (hull.begin >= hull.end) {
        return;
      }
      scores_.score_rows(hull);
      for (int r = 0; r < task_.rows; ++r) {
        softmax_.modify(r, hull);
        softmax_.soften(r, hull);
      }
      values_.add(0, task_.rows, hull, nullptr);
      for (int r = 0; r < task_.rows; ++r) {
        if (task_.at.forbids[r] && !values_.output_is_finite(r)) {  // a forbidden key shows through its weight of 0
          values_.add(r, r + 1, hull, task_.at.allowed_of(r));
        }
        partials.absorb(partials.at(chunk, task_.at.numbers[r]), task_.at.references[r], task_.at.sums[r],
                        task_.at.outputs + r * task_.at.output_ld, task_.to_log2);
      }
    });
  }

  // Writes the chunk's columns of the weights: the scores again, against the merged softmax, whose factors lie where
  // the first chunk's sums were.
  HEADWAY_NOINLINE void run_weights(std::int64_t chunk) {
    const PartialSoftmaxes<S> partials(args_);
    each_block(chunk, [&](bool, const Range& hull) {
      if (hull.begin < hull.end) {
        scores_.score_rows(hull);
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
  // body(whether these rows begin, the keys that some of them may attend to) for each block of the chunk and each set
  // of rows that passes over it together.
  template <class Body>
  HEADWAY_INLINE void each_block(std::int64_t chunk, const Body& body) {
    const std::int64_t begin = chunk * args_.chunk_keys;
    const std::int64_t end = smaller(begin + args_.chunk_keys, task_.head.ranges.keys);
    for (std::int64_t row = 0; row < args_.rows();) {
      row = task_.template start_rows<In>(row);
      for (std::int64_t key = begin; key < end; key += stream_keys) {
        const Range hull = block_.enter(key, smaller(key + stream_keys, end));
        body(key == begin, hull);
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
