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
#include <new>
#include <type_traits>

#include "engines/cpu/kernel/decode_block.h"
#include "engines/cpu/kernel/decode_bytes.h"
#include "engines/cpu/kernel/decode_partials.h"
#include "engines/cpu/kernel/decode_scores.h"
#include "engines/cpu/kernel/decode_softmax.h"
#include "engines/cpu/kernel/decode_task.h"
#include "engines/cpu/kernel/decode_values.h"
#include "engines/cpu/kernel/rows_ahead.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class Decode {
 public:
  Decode(const DecodeArgs& args, void* scratch) : args_(args), task_(args, stored_type<In>, scratch) {}

  static std::int64_t scratch_bytes(const DecodeArgs& args) {
    return DecodeLayout<S>(args, stored_type<In>, nullptr).bytes;
  }

  // Leaves the chunk's partial softmax of every row, for heads whose keys the same rows see: a few keys of each in
  // turn. More than one head have at most decode_rows rows each.
  static HEADWAY_NOINLINE void run_together(Decode* const* heads, int count, std::int64_t chunk) {
    const Decode& first = *heads[0];
    const std::int64_t size = count > 1 ? step_keys_together : step_keys_alone;
    RowsAhead<In> ahead;
    each_block(heads, count, chunk, [&](bool begins, const Range& hull) {
      for (int n = 0; begins && n < count; ++n) {
        heads[n]->clear(chunk);
      }
      if (hull.begin >= hull.end) {
        return;
      }
      const auto stream = [&](const auto& source, std::int64_t dim, const auto& part_of) {
        ahead.start(count, source, dim, hull.end);
        for (Range step = first.block_.first_step(hull, size); step.begin < step.end;
             step = first.block_.next_step(step, hull, size)) {
          ahead.enter_step(step.begin, step.end);
          for (int n = 0; n < count; ++n) {
            part_of(*heads[n]).add(step, n, ahead);
          }
        }
      };
      for (int n = 0; n < count; ++n) {
        heads[n]->scores_.begin(hull);
      }
      stream([&](int n) -> const RowSource& { return heads[n]->task_.head.key; }, first.task_.head.head_dim,
             [](Decode& head) -> Scores& { return head.scores_; });
      for (int n = 0; n < count; ++n) {
        heads[n]->scores_.end(hull);
        heads[n]->soften(hull);
        heads[n]->values_.begin(0, heads[n]->task_.rows, hull, nullptr);
      }
      stream([&](int n) -> const RowSource& { return heads[n]->task_.head.value; }, first.task_.head.value_dim,
             [](Decode& head) -> Values& { return head.values_; });
      for (int n = 0; n < count; ++n) {
        heads[n]->values_.end();
        heads[n]->absorb(chunk, hull);
      }
    });
  }

  // Writes the chunk's columns of the weights: the scores again, against the merged softmax, whose factors lie where
  // the first chunk's sums were.
  HEADWAY_NOINLINE void run_weights(std::int64_t chunk) {
    const PartialSoftmaxes<S> partials(args_);
    Decode* const alone = this;
    each_block(&alone, 1, chunk, [&](bool, const Range& hull) {
      if (hull.begin < hull.end) {
        score_all(hull);
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
  static HEADWAY_INLINE void each_block(Decode* const* heads, int count, std::int64_t chunk, const Body& body) {
    const DecodeArgs& args = heads[0]->args_;
    const std::int64_t begin = chunk * args.chunk_keys;
    const std::int64_t end = smaller(begin + args.chunk_keys, heads[0]->task_.head.ranges.keys);
    for (std::int64_t row = 0, next = 0; row < args.rows(); row = next) {
      for (int n = 0; n < count; ++n) {
        next = heads[n]->task_.template start_rows<In>(row);
      }
      for (std::int64_t key = begin; key < end; key += stream_keys) {
        Range hull{0, 0};
        for (int n = 0; n < count; ++n) {
          const Range seen = heads[n]->block_.enter(key, smaller(key + stream_keys, end));
          if (seen.begin < seen.end) {
            hull = hull.begin < hull.end ? Range{smaller(hull.begin, seen.begin), larger(hull.end, seen.end)} : seen;
          }
        }
        body(key == begin, hull);
      }
    }
  }

  void clear(std::int64_t chunk) const {
    const PartialSoftmaxes<S> partials(args_);
    for (int r = 0; r < task_.rows; ++r) {
      partials.clear(partials.at(chunk, task_.at.numbers[r]));
    }
  }

  void score_all(const Range& hull) {
    RowsAhead<In> ahead;
    ahead.start(
        1, [&](int) -> const RowSource& { return task_.head.key; }, task_.head.head_dim, hull.end);
    scores_.begin(hull);
    for (Range step = block_.first_step(hull, step_keys_alone); step.begin < step.end;
         step = block_.next_step(step, hull, step_keys_alone)) {
      ahead.enter_step(step.begin, step.end);
      scores_.add(step, 0, ahead);
    }
    scores_.end(hull);
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
        values_.add_all(r, r + 1, hull, task_.at.allowed_of(r));
      }
      partials.absorb(partials.at(chunk, task_.at.numbers[r]), task_.at.references[r], task_.at.sums[r],
                      task_.at.outputs + r * task_.at.output_ld, task_.to_log2);
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

// What `count` heads need.
template <class S, class In>
std::int64_t decode_scratch_of(const DecodeArgs& args, int count) {
  constexpr auto object = static_cast<std::int64_t>((sizeof(Decode<S, In>) + 63) / 64 * 64);
  return count * (object + Decode<S, In>::scratch_bytes(args));
}

// The chunk of some heads, together.
template <class S, class In>
void decode_heads(const DecodeArgs* heads, int count, std::int64_t chunk, void* scratch) {
  const std::int64_t each = decode_scratch_of<S, In>(heads[0], 1), own = Decode<S, In>::scratch_bytes(heads[0]);
  Decode<S, In>* decodes[most_heads_together];
  for (int n = 0; n < count; ++n) {
    char* const memory = static_cast<char*>(scratch) + n * each;
    decodes[n] = new (memory + own) Decode<S, In>(heads[n], memory);
  }
  Decode<S, In>::run_together(decodes, count, chunk);
}

}  // namespace
}  // namespace headway::cpu
