// Statistics of the weights p(i,j), maps of them, and any part of their matrix, exact, without storing the matrix, at
// lengths at which it would not fit into memory. Memory grows with the rows and keys, not with their product.
// Query and key (and masks, biases, slopes and sinks) may be on a CUDA device. They are then analyzed there, in the
// order of AttentionOptions::stream; results are in host memory, and a call returns when they have arrived. It waits
// only once. (mean_weights leaves its result on the device and does not wait.) Progress is reported before the
// work is queued and when it is done. The same call gives the same bits.
#pragma once

#include <cstdint>
#include <optional>

#include "headway/attention.h"
#include "headway/cxx20.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

struct AnalysisRequest {
  std::int64_t top = 8;      // the number of strongest keys to list for each row
  Window near = {64, 64};    // the window around the diagonal whose weights are summed in `near`
  std::int64_t cells = 256;  // the most cells along each side of the maps, 0 to 512; 0 for no maps
};

// Statistics of the weights p(i,j) of every row and head, before dropout. A row with no key has 0 everywhere. With
// sinks a row's weights sum to less than 1; the sink's share is not included. f64 for f64 inputs, f32 for others.
// Query i is at key position i + offset, as for causal and window.
struct Analysis {
  Tensor lse;          // [B,H,Sq]
  Tensor entropy;      // [B,H,Sq]     -sum_j p log p, natural logarithm
  Tensor distance;     // [B,H,Sq]     sum_j p |i + offset - j|
  Tensor first;        // [B,H,Sq]     the weight of key 0
  Tensor diagonal;     // [B,H,Sq]     the weight of key i + offset
  Tensor near;         // [B,H,Sq]     the weights inside the request's `near`
  Tensor received;     // [B,H,Sk]     sum_i p: the weight that each key received
  Tensor top_keys;     // [B,H,Sq,top] i64, largest weight first, ties by key; -1 after the last weight that is not 0
  Tensor top_weights;  // [B,H,Sq,top] 0 there

  // Cells of row_cell x key_cell weights (fewer at the ends); a forbidden weight is 0.
  std::int64_t row_cell = 0, key_cell = 0;
  Tensor map_mean;    // [B,H,R,C]
  Tensor map_max;     // [B,H,R,C]
  Tensor similarity;  // [B,H,H]       the cosine between the heads' mean maps; 0 where a map is all zero
};

// The mean of one of the statistics [B,H,Sq] over the rows of a head; 0 if there are no rows.
double mean_over_rows(ConstTensorView statistic, std::int64_t batch, std::int64_t head);

// query [B,H,Sq,D] and key [B,Hkv,Sk,D], or with fewer axes as attention takes them; the results always have B and H.
// Options as for attention. Computes the scores only: about half of attention's work.
Analysis analyze(ConstTensorView query, ConstTensorView key, const AttentionOptions& options = {},
                 const AnalysisRequest& request = {});

// Rows [row_begin, row_end) and keys [key_begin, key_end) of a matrix.
struct Rectangle {
  std::int64_t row_begin = 0, row_end = 0;
  std::int64_t key_begin = 0, key_end = 0;
};

// The exact weights inside the rectangle, [B,H,rows,keys], f64 for f64 inputs and f32 for others. Given the lse
// [B,H,Sq] that attention or analyze wrote, on the device of query and key or in host memory, only the rectangle's own
// scores are computed; without it, whole rows, and on the CPU those of rows with an lse beyond 2^12 (f64: 2^41), whose
// rounding would show.
Tensor weights_in(ConstTensorView query, ConstTensorView key, const Rectangle& rectangle,
                  const AttentionOptions& options = {}, const std::optional<ConstTensorView>& lse = {});

// Mean and largest weight in every cell of a grid over the rectangle of one head; cells at the ends may be smaller.
struct TileMap {
  Tensor mean;  // [R,C]
  Tensor max;   // [R,C]
};
TileMap tile_map(ConstTensorView query, ConstTensorView key, ConstTensorView lse, std::int64_t batch, std::int64_t head,
                 const Rectangle& rectangle, std::int64_t row_cell, std::int64_t key_cell,
                 const AttentionOptions& options = {});

// The mean of the weights over the heads into `mean` [B,Sq,Sk] (without B where query has none), in query's type:
// summed in f32 (f64 for f64 inputs), head after head, and rounded once. lse [B,H,Sq] is what attention wrote. All are
// on one device; on CUDA the call only queues its work on AttentionOptions::stream. Dropout is ignored.
void mean_weights(ConstTensorView query, ConstTensorView key, ConstTensorView lse, TensorView mean,
                  const AttentionOptions& options = {});

}  // namespace headway
#pragma GCC visibility pop
