// The kernels behind an analysis as the host side calls them: their arguments, and the launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

// Which tiles a kernel walks over: all of them; or, where simple ones have a kernel of their own (simple_tiles.cuh),
// the others, first for the rows' softmax, and then for everything else.
enum class AnalysisPart : std::uint8_t { all, softmax_of_edges, edges };

// What the weights p of some heads say about rows [row_begin, row_end) and keys [key_begin, key_end), without storing
// them. A result without memory was not asked for. Results are contiguous, f64 for f64 inputs and f32 for others.
struct AnalysisArguments : Arguments {
  std::int64_t first_head, head_count;  // of the B * H
  std::int64_t row_begin, row_end, key_begin, key_end;
  Rows given_lse;                           // [B,H,Sq], with the sink; without data: computed
  std::int64_t tiles, chunk_tiles, chunks;  // of 64 rows; a block of threads has one chunk of them
  std::int64_t near_left, near_right;       // keys before and after a row's position
  void *lse, *entropy, *distance;           // [B,H,Sq], and so the next
  void *first, *diagonal, *near;
  std::int64_t top;
  void* top_weights;       // [B,H,Sq,top], 0 before
  std::int64_t* top_keys;  // the same, -1 before
  double* received;        // [head_count,chunks,Sk], added to
  std::int64_t row_cell, key_cell;
  std::int64_t columns, pieces;  // cells along the keys; pieces of cells along the rows, see analysis_pieces.h
  double* cell_sums;             // [head_count,pieces,columns], added to
  void* cell_highest;            // the same, raised
  void* weights;                 // [head_count,rows,keys], 0 before
  AnalysisPart part;
  // What the kernels leave each other: the rows' softmax and sums, and the tiles of rows left to the edges' kernel.
  float* row_softmax;  // [head_count,rows,2]
  double* row_sums;    // [head_count,rows,3]
  int* left_out;       // [head_count,tiles]
};

// Sums become results: what every key received.
struct ReceivedArguments {
  std::int64_t first_head, head_count, chunks, keys;
  const double* sums;  // [head_count,chunks,keys]
  void* received;      // [B,H,keys]
};

// Means and largest weights of the cells of some rows.
struct CellsArguments {
  std::int64_t head_count, rows, keys;  // weights, not cells
  std::int64_t row_cell, key_cell, cell_rows, columns, pieces;
  const double* sums;
  const void* highest;  // [head_count,pieces,columns]
  void *mean, *max;     // [head_count,cell_rows,columns]
};

// The cosine between the heads' mean maps.
struct SimilarityArguments {
  std::int64_t batch, heads, cells;
  const void* mean;  // [B,H,cells]
  double* products;  // [B,H,H]
  void* similarity;  // [B,H,H]
};

// The walks, on tensor cores or exact, and those over simple tiles alone, as tensor cores are since 8.0 and on 9.0;
// then the same small kernels for all types.
Launch simt_analysis_launch(const AnalysisArguments& arguments, DType dtype);
Launch mma_analysis_launch(const AnalysisArguments& arguments, DType dtype);
Launch mma_simple_analysis_launch(const AnalysisArguments& arguments, DType dtype);
Launch hopper_simple_analysis_launch(const AnalysisArguments& arguments, DType dtype);
cudaError_t launch_analysis(const Launch& launch, const AnalysisArguments& arguments, cudaStream_t stream);
// `wide`: results are f64.
cudaError_t launch_received(const ReceivedArguments& arguments, bool wide, cudaStream_t stream);
cudaError_t launch_cells(const CellsArguments& arguments, bool wide, cudaStream_t stream);
cudaError_t launch_similarity(const SimilarityArguments& arguments, bool wide, cudaStream_t stream);

}  // namespace headway::cuda
