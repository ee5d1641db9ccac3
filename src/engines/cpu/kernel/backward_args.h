// The arguments of the backward kernels, besides args.h. A BackwardArgs is one kv head of one batch item (or packed
// sequence) with the query heads that share it. Its work is four kinds of tasks; a kind begins when the ones it reads
// are done:
//   prepare    a head's rows, in multiples of query_block  references, lse and delta, from grad_out, out and lse
//   gradients  a chunk of keys, all heads of the group     dk, dv, a dq partial per head, dbias where no axis is summed
//              or some of them                             the same, but a part of dk and dv
//   sum        a head's rows, in multiples of query_block  dq from the partials; short sequences have none
//              a kv head's keys                            dk and dv from their parts, if there are any
//   bias       a region of dbias                           dbias where axes are summed over; needs `prepare` alone
// The bits depend on the chunks, which key_chunks() derives from the ranges alone, and on the parts, which follow from
// the sequence's own lengths, ranges and number of heads; on no other cut.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"

namespace headway::cpu {

constexpr int most_key_chunks = 4;
constexpr std::int64_t compensated_keys = 8192;  // a longer chunk's dq partials keep what they lose

// Chunk c holds keys [begin[c], begin[c + 1]).
struct KeyChunks {
  std::int64_t begin[most_key_chunks + 1] = {};
  double pairs[most_key_chunks] = {};  // of queries and keys in a chunk, about
  int count = 0;
};

struct BackwardHead {
  Matrix query, grad_out, out;  // [Sq, D], [Sq, Dv], [Sq, Dv]
  const void* lse = nullptr;    // natural log, in the compute type
  std::int64_t lse_stride = 0;
  RangeRule ranges;  // the sequence's, with the head's own spans
  Modifiers modifiers;
  DropoutRule dropout;
  double sink = 0;
  bool has_sink = false;
  // [Sq] in the compute type. A row whose lse is large has a score as its reference, and what is left of lse counts
  // from there; others have 0. backward_large_rows.h says why.
  void* references = nullptr;
  void* prepared_lse = nullptr;  // in the units of the scores
  void* delta = nullptr;         // <grad_out, out>
  void* dq_partials =
      nullptr;              // [chunks][Sq][padded D] in the compute type, 64-byte aligned; null: not wanted, or short
  void* dq_lost = nullptr;  // like dq_partials: what rounding those loses; null where chunks are short enough without
  WritableMatrix dq;        // [Sq, D]; data null: not wanted
  WritableMatrix dbias;     // [Sq, Sk]; data null: not wanted, or summed over axes
  Storage dbias_storage = Storage::f32;
};

struct BackwardArgs {
  Matrix key, value;      // [Sk, D], [Sk, Dv]
  WritableMatrix dk, dv;  // data null: not wanted
  const BackwardHead* heads = nullptr;
  std::int64_t head_count = 0;
  std::int64_t queries = 0;
  std::int64_t head_dim = 0, value_dim = 0;
  RangeRule ranges;  // its spans, those of one head, count for the cut into chunks alone
  std::int64_t span_planes =
      0;  // different spans of the group's heads: 0 without spans, 1 if they share them, or a head each
  double scale = 1;
  bool of_longer_rows = false;  // as in BackwardProblem
  KeyChunks chunks;
  bool stores_part = false;  // dk and dv are one part of them, in the compute type
  // For their sum: [parts][Sk][D] and [parts][Sk][Dv] in the compute type.
  const void *dk_parts = nullptr, *dv_parts = nullptr;
  int key_parts = 1;
  // The first rows of the kv head, and of the first of its query heads, that this thread does next, to be fetched;
  // null: not known.
  const void *next_key = nullptr, *next_value = nullptr;
  const void *next_query = nullptr, *next_grad_out = nullptr, *next_out = nullptr;
};

// A part of a dbias that has size 1 along the axes to sum over: rows x keys at one (b, h) of dbias, summed over the
// call's [batch_begin, batch_end) x [head_begin, head_end): one item along an axis that dbias has, all along the
// others.
struct BiasRegion {
  const BackwardArgs* sequences = nullptr;  // [batch][kv heads]
  std::int64_t kv_heads = 0;
  std::int64_t batch_begin = 0, batch_end = 0;
  std::int64_t head_begin = 0, head_end = 0;
  std::int64_t row_begin = 0, row_end = 0;  // all rows where they are summed over
  std::int64_t key_begin = 0, key_end = 0;  // all keys where they are summed over
  bool sum_rows = false, sum_keys = false;
  WritableMatrix dbias;  // [Sq or 1, Sk or 1]
  Storage dbias_storage = Storage::f32;
};

}  // namespace headway::cpu
