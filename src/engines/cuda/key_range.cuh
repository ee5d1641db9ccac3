// Sequences and key ranges on the device: core/range_rule.h applied to what Arguments hold. Lengths that came from
// device memory were not checked on the host, so all are cut to what is legal here.
#pragma once

#include "core/range_rule.h"
#include "engines/cuda/arguments.h"

namespace headway::cuda {

__device__ inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
__device__ inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

__device__ inline std::int64_t length_at(const Lengths& lengths, std::int64_t b, std::int64_t row, std::int64_t most) {
  const std::int64_t at = b * lengths.batch + row * lengths.row;
  const std::int64_t value = lengths.wide ? static_cast<const std::int64_t*>(lengths.data)[at]
                                          : static_cast<const std::int32_t*>(lengths.data)[at];
  return smaller(larger(value, 0), most);
}

// The row's entry of valid_lens, or the sequence's number of keys.
__device__ inline std::int64_t valid_len(const Arguments& arguments, const Sequence& sequence, std::int64_t b,
                                         std::int64_t i) {
  return arguments.valid_lens.data == nullptr ? sequence.key_count
                                              : length_at(arguments.valid_lens, b, i, sequence.key_count);
}

__device__ inline Sequence sequence_of(const Arguments& arguments, std::int64_t b) {
  Sequence result;
  result.query_count = arguments.query_len;
  result.key_count = arguments.key_len;
  if (arguments.cu_seqlens_q.data != nullptr) {
    const std::int64_t queries = arguments.total_queries;
    result.query_begin = length_at(arguments.cu_seqlens_q, b, 0, queries);
    result.query_count = length_at(arguments.cu_seqlens_q, b + 1, 0, queries) - result.query_begin;
    result.query_count = smaller(larger(result.query_count, 0), arguments.query_len);
  }
  if (arguments.pages.table != nullptr) {
    result.key_count = length_at(arguments.pages.lengths, b, 0, arguments.key_len);
  } else if (arguments.cu_seqlens_k.data != nullptr) {
    const std::int64_t keys = arguments.total_keys;
    result.key_begin = length_at(arguments.cu_seqlens_k, b, 0, keys);
    result.key_count = length_at(arguments.cu_seqlens_k, b + 1, 0, keys) - result.key_begin;
    result.key_count = smaller(larger(result.key_count, 0), arguments.key_len);
  }
  result.real_queries = arguments.query_lens.data == nullptr
                            ? result.query_count
                            : length_at(arguments.query_lens, b, 0, result.query_count);
  const std::int64_t real_keys = arguments.valid_lens_per_batch ? valid_len(arguments, result, b, 0) : result.key_count;
  result.offset = alignment_offset(arguments.rule, result, real_keys);
  return result;
}

// A tile may reach past the last row: such a row has no entry in valid_lens.
__device__ inline KeyRange row_range(const Arguments& arguments, const Sequence& sequence, std::int64_t b,
                                     std::int64_t i) {
  if (i >= sequence.real_queries) {
    return {0, 0};
  }
  return key_range(arguments.rule, sequence, i, valid_len(arguments, sequence, b, i));
}

// What a tile of rows [first, first + rows) needs: the keys that some row sees, and those that every row sees.
struct TileRange {
  std::int64_t begin, end;            // outside of it no row sees a key: skip
  std::int64_t full_begin, full_end;  // inside of it every row sees every key: no masking by ranges
};

// The ends of a range grow with i, but for valid_lens [B,Sq], which may give each row its own end.
__device__ inline TileRange tile_range(const Arguments& arguments, const Sequence& sequence, std::int64_t b,
                                       std::int64_t first, std::int64_t rows) {
  const std::int64_t real = smaller(first + rows, sequence.real_queries);
  if (first >= real) {
    return {0, 0, 0, 0};
  }
  const bool own_ends = arguments.valid_lens.data != nullptr && !arguments.valid_lens_per_batch;
  const std::int64_t valid = own_ends ? sequence.key_count : valid_len(arguments, sequence, b, 0);
  const std::int64_t low = first + sequence.offset, high = real - 1 + sequence.offset;
  TileRange tile;
  tile.begin = larger(low - arguments.rule.left, 0);
  tile.end = smaller(high + arguments.rule.right + 1, valid);
  tile.full_begin = larger(high - arguments.rule.left, 0);
  tile.full_end = smaller(low + arguments.rule.right + 1, valid);
  // Rows of the tile past the last real one see nothing.
  if (own_ends || real < first + rows) {
    tile.full_begin = tile.full_end = 0;
  }
  if (tile.begin >= tile.end) {
    return {0, 0, 0, 0};
  }
  return tile;
}

// The queries that may see some key of [first, first + keys).
struct QueryRange {
  std::int64_t begin, end;
};

__device__ inline QueryRange query_range(const Arguments& arguments, const Sequence& sequence, std::int64_t b,
                                         std::int64_t first, std::int64_t keys) {
  const bool own_ends = arguments.valid_lens.data != nullptr && !arguments.valid_lens_per_batch;
  const std::int64_t valid = own_ends ? sequence.key_count : valid_len(arguments, sequence, b, 0);
  const std::int64_t last = smaller(first + keys, valid);
  if (first >= last) {
    return {0, 0};
  }
  const QueryRange range{larger(first - arguments.rule.right - sequence.offset, 0),
                         smaller(last + arguments.rule.left - sequence.offset, sequence.real_queries)};
  return range.begin < range.end ? range : QueryRange{0, 0};
}

}  // namespace headway::cuda
