// One attention call as a kernel reads it: a plain struct with device pointers, strides in elements and resolved
// options, passed by value. arguments.cpp makes it from a Problem; key_range.cuh and modifiers.cuh read it.
#pragma once

#include <cstdint>

#include "core/philox.h"
#include "core/range_rule.h"
#include "headway/dtype.h"

namespace headway::cuda {

// A [B,H,S,D] view; of lse and other [B,H,S] values only the first three strides count.
struct Rows {
  void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0, feature = 0;
  bool chunks = false;  // 16-byte chunks of a row lie together and aligned: they may be copied whole
};

// A [B,H,Sq,Sk] view of any float type, or of bools.
struct Matrix {
  void* data = nullptr;  // null: the call has none
  std::int64_t batch = 0, head = 0, query = 0, key = 0;
  DType dtype = DType::f32;
};

// [H], any float type.
struct PerHead {
  void* data = nullptr;
  std::int64_t stride = 0;
  DType dtype = DType::f32;
};

// Integer lengths [B] or [B,Sq] in device memory.
struct Lengths {
  const void* data = nullptr;
  std::int64_t batch = 0, row = 0;
  bool wide = false;  // i64, else i32
};

// A part of the keys, [begin, end).
struct Span {
  std::int32_t begin = 0, end = 0;
};

// Tiles of 64 rows x 64 keys as bits: a line of `words` words for each tile of one side, a bit for each tile of the
// other. Packed sequences have their lines one after another, those of item b from its first row / 64 + b on.
struct TileBits {
  std::uint64_t* lines = nullptr;
  std::int64_t batch = 0, head = 0;  // strides, in lines
  std::int64_t words = 0;
};

// The parts of the keys that rows see (core/spans.h), in normal form, and what they leave of each tile: spans.cuh.
struct Spans {
  Span* data = nullptr;
  std::int64_t batch = 0, head = 0;  // strides, in entries
  std::int64_t count = 0;            // spans of an entry
  std::int64_t rows = 1;             // query rows of an entry
  TileBits seen, whole;              // lines of row tiles: tiles with an allowed pair, and without a forbidden one
  TileBits seen_by_key;              // `seen`, with lines of key tiles
  bool given = false;
};

// The f32 scales of 8-bit pages, [pages, heads, slots].
struct PageScales {
  const float* data = nullptr;
  std::int64_t page = 0, head = 0, slot = 0;
};

// Keys and values in pages (headway/serving.h). `key` and `value` have the page on their batch axis then, and its slots
// as their rows; kernels/pages.cuh finds a key's.
struct PageArguments {
  // [B, entries] in device memory; null: there are no pages. Of i64 entries the low half, which says as much: what is
  // out of range is cut anyway.
  const std::int32_t* table = nullptr;
  std::int64_t sequence_step = 0, entry_step = 0;  // strides, in such words
  int size = 1;                                    // slots of a page
  // key / size = (high half of key * size_factor, + key) >> size_shift for keys below 2^31
  std::uint32_t size_factor = 1;
  int size_shift = 0;
  int count = 0;    // pages that there are
  Lengths lengths;  // keys of each sequence [B]
  PageScales key_scales, value_scales;
};

struct DropoutArguments {
  Philox4x32::Schedule keys{};
  std::uint64_t threshold = 0;  // see core/dropout.h
  double kept_scale = 1.0;
  bool active = false;
};

struct Arguments {
  std::int64_t batch, heads, kv_heads, group;  // group = heads / kv_heads
  std::int64_t query_len, key_len;             // of the longest sequence
  std::int64_t total_queries, total_keys;      // of the S axes: what packed sequences must stay inside
  std::int64_t head_dim, value_dim;
  Rows query, key, value;
  PageArguments pages;

  RangeRule rule;
  Lengths cu_seqlens_q, cu_seqlens_k, valid_lens, query_lens;
  bool valid_lens_per_batch;
  Spans spans;

  double scale, softcap;  // softcap 0: none
  Matrix bias, mask;
  PerHead slopes, sinks;
  DropoutArguments dropout;
};

enum class Stage : std::uint8_t { scaled, capped, biased, weights };

struct ForwardArguments : Arguments {
  Rows out;
  Rows lse;  // without data: not asked for
};

// The score matrix after a stage of the definition.
struct ScoresArguments : Arguments {
  Matrix scores;  // in the inputs' type
  Stage stage;
};

// What a gradient kernel accumulates.
enum class GradientOf : std::uint8_t { query, key, value, key_and_value };

struct GradientArguments : Arguments {
  Rows grad_out;
  Rows lse, delta;      // f64 for f64 inputs, f32 otherwise
  Rows gradient;        // of query or key
  Rows value_gradient;  // without data: not asked for, and so above
  GradientOf of;
  // The walk of a tile is shared out to so many blocks. Above 1 the two gradients above are places of f32 sums in
  // workspace, of the first part; those of the next part lie part_step and value_part_step numbers further.
  int parts = 1;
  std::int64_t part_step = 0, value_part_step = 0;
};

// One gradient as parts, [parts] x [B,H,S,D] in workspace, which are added up in their order.
struct GradientPartsArguments {
  Rows parts, gradient;
  std::int64_t part_step;
  int count;
  std::int64_t batch, heads, rows, width;
};

// Rows whose lse says too little of their weights (kernels/plain_rows.cuh): the kernels for all pairs leave them out,
// and one in plain arithmetic brings their part.
struct CoarseRows {
  int* found;          // for each tile of rows, in order of b, h and the rows: whether it has such a row
  std::int64_t tiles;  // of a head
  int tile_rows;
  Rows statistics;  // [B,H,Sq] CoarseRow<Real>, filled for such rows alone
  bool all;         // rows that see a key are such rows: the scale is extreme
};

// A row's weights are factor * exp(score - base).
template <class Real>
struct WeightBase {
  Real base, factor;
};

template <class Real>
struct CoarseRow {
  WeightBase<Real> weights;
  WeightBase<Real> ordered_weights;  // for scores as simt_pairs.cuh sums them, where the bias has a gradient
  Real delta;
};

// delta(i) = <grad_out(i), out(i)>
struct DeltaArguments : Arguments {
  Rows grad_out, out, lse, delta;
  Rows fine_lse;      // lse, but +inf for coarse rows, which are left out; without data: not asked for
  CoarseRows coarse;  // `found`, unless null, and `all`
};

struct CoarseGradientArguments : Arguments {
  Rows grad_out, out, lse;
  CoarseRows coarse;
  Rows query_gradient, key_gradient, value_gradient;  // without data: not asked for
  bool of_bias;                                       // that has a gradient too
};

struct BiasGradientArguments : Arguments {
  Rows grad_out, lse, delta;
  CoarseRows coarse;
  Matrix gradient;  // size 1, and stride 0, along the axes to sum over
  bool sums[4];     // over b, h, i, j
};

struct SinkGradientArguments : Arguments {
  Rows lse, delta;
  CoarseRows coarse;
  PerHead gradient;
};

}  // namespace headway::cuda
