// The arguments of a kernel: bare pointers, strides in elements and numbers, for one head of one batch item. The host
// sets them from a Problem; no type here has code, so all instruction sets may share them.
#pragma once

#include <cstdint>

#include "core/range_rule.h"

namespace headway::cpu {

enum class Storage : std::uint8_t { f32, f64, bf16, f16 };

// A [rows, columns] matrix.
struct Matrix {
  const void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
};

// The type of 8-bit rows; other rows have the storage type of the call.
enum class ScaledAs : std::uint8_t { nothing, int8, float8 };

// The source of the [rows, columns] of one head's K or V; kernel/row_source.h reads them. Rows are at a constant stride
// or in pages: row j is in slot j % page_size of page table[j / page_size].
struct RowSource {
  Matrix rows;                  // in pages: those of page 0
  const void* table = nullptr;  // integers; null: no pages
  std::int64_t table_stride = 0;
  bool table_is_i64 = false;
  std::int64_t page_size = 0;
  std::int64_t page_stride = 0;  // in elements
  int page_shift = -1;           // page_size is 2 to this power; -1: it is no power of two
  // 8-bit rows: an element counts as scale * element, in float. The scales of page 0, and their strides.
  ScaledAs scaled = ScaledAs::nothing;
  const float* scales = nullptr;
  std::int64_t scale_stride = 0, scale_page_stride = 0;
};

struct WritableMatrix {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
};

// The spans of a head's rows, in the normal form of core/spans.h; strides in elements.
struct SpanLists {
  const void* data = nullptr;  // null: none, every row sees its whole range
  std::int64_t entry_stride = 0, span_stride = 0, end_stride = 0;
  std::int64_t count = 0;  // of an entry
  std::int64_t rows = 1;   // query rows that share an entry
  bool are_i64 = false;
};

// Which keys row i may attend to, before masks: those of the rule of its sequence, cut at valid_lens[i] where there are
// any, that lie in one of its spans where there are any.
struct RangeRule : RowRule {
  const void* valid_lens = nullptr;  // one per row
  std::int64_t valid_lens_stride = 0;
  bool valid_lens_are_i64 = false;
  SpanLists spans;
};

struct Modifiers {
  double softcap = 0;  // 0: none
  Matrix bias;         // data null: none
  Storage bias_storage = Storage::f32;
  Matrix mask;  // bytes; data null: none
  double alibi_slope = 0;
  bool has_alibi = false;
  bool any = false;  // whether scores are changed at all
};

struct DropoutRule {
  std::uint64_t seed = 0;
  std::uint64_t threshold = 0;  // 0: none
  double kept_scale = 1;
  std::uint32_t batch = 0, head = 0;
  std::int64_t first_row = 0, first_key = 0;  // of this call in a longer one that it is a part of
  bool active = false;
};

struct ForwardArgs {
  Matrix query;          // [Sq, D]
  RowSource key, value;  // [Sk, D], [Sk, Dv]
  WritableMatrix out;    // [Sq, Dv]
  void* lse = nullptr;   // null: not wanted
  std::int64_t lse_stride = 0;
  WritableMatrix weights;  // [Sq, Sk]; data null: not wanted
  std::int64_t head_dim = 0, value_dim = 0;
  RangeRule ranges;
  Modifiers modifiers;
  DropoutRule dropout;
  double scale = 1;
  double sink = 0;
  bool has_sink = false;
  std::int64_t row_begin = 0, row_end = 0;        // the query rows to do now
  std::uint64_t stored_rows = ~std::uint64_t{0};  // bit r of a task of one panel: whether row_begin + r is stored
  // The first rows of the head that this thread does next, to be fetched; null: not known, or the same ones.
  const void *next_query = nullptr, *next_key = nullptr, *next_value = nullptr;
};

}  // namespace headway::cpu
