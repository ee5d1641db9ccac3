// Parts of the matrix: exact weights, and maps of them, from the scores and lse.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "analysis/on_device.h"
#include "analysis/row_statistics.h"
#include "analysis/slice.h"
#include "core/ceil_div.h"
#include "core/checks.h"
#include "core/key_range.h"
#include "core/out_of_memory.h"
#include "core/overlap.h"
#include "core/parallel.h"
#include "headway/threads.h"

namespace headway {
namespace {

// Turns the scores of a row, or of some of its keys, into weights. Whether exp(s - lse) is as accurate as any weight:
// lse is one rounded number, and past this limit rounding costs more than 2^-12 of a weight, at 10^9 in f32 a factor of
// e^64. Where large products cancel, a small lse is as far from scores that another kernel rounds: then weights of a
// row do not add up to 1. A NaN says nothing of single keys. -inf is a row without keys.
template <class T>
bool gives_weights(T lse, bool all_keys, std::int64_t keys, T* scores) {
  constexpr T limit = sizeof(T) == 4 ? static_cast<T>(0x1p12) : static_cast<T>(0x1p41);
  const bool empty = lse == -std::numeric_limits<T>::infinity();
  if (!empty && !(std::abs(lse) <= limit)) {
    return false;
  }
  const double sum = exponentiate(scores, keys, lse);
  return empty || std::isnan(sum) || (sum < 1 + 0x1p-6 && (!all_keys || sum > 1 - 0x1p-6));
}

// The weights of a rectangle of one head into `target` [rows,keys], contiguous rows, from all keys of the rows.
template <class T>
void fill_from_whole_rows(const Problem& problem, std::int64_t b, std::int64_t h, const Rectangle& part,
                          const HeadInputs& inputs, T* target) {
  const std::int64_t rows = part.row_end - part.row_begin, keys = part.key_end - part.key_begin;
  Tensor whole = Tensor::uninitialized({rows, problem.key_len}, dtype_of<T>);
  Tensor row_lse = Tensor::uninitialized({rows}, dtype_of<T>);
  const Slice slice(problem, b, h, {part.row_begin, part.row_end, 0, problem.key_len},
                    inputs.query.slice(0, part.row_begin, part.row_end), inputs.key);
  slice.weights(whole, row_lse);
  copy(whole.view().slice(1, part.key_begin, part.key_end), TensorView(target, {rows, keys}));
}

// The same from the scores of the rectangle and the `lse` [Sq] of the rows, but for rows where that says too little.
template <class T>
void fill_from_lse(const Problem& problem, std::int64_t b, std::int64_t h, const Rectangle& part,
                   const HeadInputs& inputs, const ConstTensorView& lse, T* target) {
  const std::int64_t rows = part.row_end - part.row_begin, keys = part.key_end - part.key_begin;
  const Slice slice(problem, b, h, part, inputs.query.slice(0, part.row_begin, part.row_end),
                    inputs.key.slice(0, part.key_begin, part.key_end));
  slice.scores(TensorView(target, {rows, keys}));
  const bool all_keys = keys == problem.key_len && !problem.sinks;
  const std::int64_t at_once = rows_at_once(problem.key_len);
  std::int64_t begin = 0;  // of the rows before i that need all keys
  for (std::int64_t i = 0; i <= rows; ++i) {
    const bool ends = i == rows || gives_weights(lse.at<T>({part.row_begin + i}), all_keys, keys, target + i * keys);
    if (begin < i && (ends || i - begin == at_once)) {
      fill_from_whole_rows(problem, b, h, {part.row_begin + begin, part.row_begin + i, part.key_begin, part.key_end},
                           inputs, target + begin * keys);
      begin = i;
    }
    if (ends) {
      begin = i + 1;
    }
  }
}

template <class T>
void fill(const Problem& problem, std::int64_t b, std::int64_t h, const Rectangle& part, const HeadInputs& inputs,
          const std::optional<ConstTensorView>& lse, T* target) {
  lse ? fill_from_lse(problem, b, h, part, inputs, *lse, target)
      : fill_from_whole_rows(problem, b, h, part, inputs, target);
}

// The rows of a rectangle in parts that fit into a buffer.
template <class Visit>
void for_row_blocks(const Rectangle& part, std::int64_t at_once, const Visit& visit) {
  const std::int64_t blocks = ceil_div(part.row_end - part.row_begin, at_once);
  parallel_for(blocks, get_threads(), [&](std::int64_t block, int) {
    Rectangle current = part;
    current.row_begin = part.row_begin + block * at_once;
    current.row_end = std::min(current.row_begin + at_once, part.row_end);
    visit(current);
  });
}

// [B,H,Sq] from as many axes as the inputs had.
ConstTensorView full_lse(const Problem& problem, const ConstTensorView& lse) {
  ConstTensorView full = lse;
  while (full.rank() < 3) {
    full = full.unsqueeze(0);
  }
  if (lse.rank() == 2 && problem.heads == 1 && problem.batch != 1) {
    full = lse.unsqueeze(1);
  }
  check_lse_type(problem, full);
  if (full.device() == Device{}) {  // where analyze leaves it, also for query and key on a device
    check_alignment(problem, "lse", full);
  } else {
    check_storage(problem, "lse", full);
  }
  check_sizes(problem, "lse", full, {problem.batch, problem.heads, problem.query_len});
  return full;
}

template <class T>
Tensor weights_of(const Problem& problem, const Rectangle& rectangle, const std::optional<ConstTensorView>& lse) {
  const std::int64_t rows = rectangle.row_end - rectangle.row_begin, keys = rectangle.key_end - rectangle.key_begin;
  Tensor result({problem.batch, problem.heads, rows, keys}, dtype_of<T>);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      const HeadInputs inputs(problem, b, h);
      const auto head_lse = lse ? std::optional(lse->select(0, b).select(0, h)) : std::nullopt;
      T* head = result.as<T>() + (b * problem.heads + h) * rows * keys;
      for_row_blocks(rectangle, rows_at_once(problem.key_len), [&](const Rectangle& part) {
        fill(problem, b, h, part, inputs, head_lse, head + (part.row_begin - rectangle.row_begin) * keys);
      });
    }
  }
  return result;
}

// mean [B,Sq,Sk], from sums over the heads of as many rows as a buffer holds.
template <class T>
void write_mean(const Problem& problem, const ConstTensorView& lse, const TensorView& mean) {
  const std::int64_t keys = problem.key_len;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    std::vector<HeadInputs> inputs;
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      inputs.emplace_back(problem, b, h);
    }
    for_row_blocks({0, problem.query_len, 0, keys}, rows_at_once(keys), [&](const Rectangle& part) {
      const auto elements = static_cast<std::size_t>((part.row_end - part.row_begin) * keys);
      std::vector<T> sums(elements), weights(elements);
      for (std::int64_t h = 0; h < problem.heads; ++h) {
        fill(problem, b, h, part, inputs[static_cast<std::size_t>(h)], std::optional(lse.select(0, b).select(0, h)),
             weights.data());
        std::transform(sums.begin(), sums.end(), weights.begin(), sums.begin(), std::plus<>());
      }
      for (T& sum : sums) {
        sum /= static_cast<T>(std::max<std::int64_t>(problem.heads, 1));
      }
      copy(ConstTensorView(sums.data(), {part.row_end - part.row_begin, keys}),
           mean.select(0, b).slice(0, part.row_begin, part.row_end));
    });
  }
}

// Turns the sums of a row of cells into means, for `rows` rows and `keys` keys, and resets them.
template <class T>
void means_of(std::vector<double>& sums, std::int64_t rows, std::int64_t keys, std::int64_t key_cell, T* means) {
  for (std::size_t c = 0; c < sums.size(); ++c) {
    const std::int64_t width = std::min(key_cell, keys - static_cast<std::int64_t>(c) * key_cell);
    means[c] = static_cast<T>(sums[c] / static_cast<double>(rows * width));
    sums[c] = 0;
  }
}

template <class T>
TileMap map_of(const Problem& problem, std::int64_t b, std::int64_t h, const Rectangle& rectangle,
               std::int64_t row_cell, std::int64_t key_cell, const ConstTensorView& lse) {
  const std::int64_t keys = rectangle.key_end - rectangle.key_begin;
  const std::int64_t cell_rows = ceil_div(rectangle.row_end - rectangle.row_begin, row_cell);
  const std::int64_t cell_keys = ceil_div(keys, key_cell);
  TileMap map{Tensor({cell_rows, cell_keys}, dtype_of<T>), Tensor({cell_rows, cell_keys}, dtype_of<T>)};
  const HeadInputs inputs(problem, b, h);
  // A block is one row of cells, in several buffers if need be, or as many rows of cells as fill a buffer: every block
  // packs the keys again.
  const std::int64_t at_once = rows_at_once(keys);
  const std::int64_t block_rows = std::max<std::int64_t>(at_once / row_cell, 1) * row_cell;
  for_row_blocks(rectangle, block_rows, [&](const Rectangle& block) {
    std::vector<T> weights(static_cast<std::size_t>(std::min(at_once, block_rows) * keys));
    std::vector<double> sums(static_cast<std::size_t>(cell_keys));
    for (std::int64_t row = block.row_begin; row < block.row_end; row += at_once) {
      Rectangle part = block;
      part.row_begin = row;
      part.row_end = std::min(row + at_once, block.row_end);
      fill(problem, b, h, part, inputs, lse, weights.data());
      for (std::int64_t i = row; i < part.row_end; ++i) {
        const std::int64_t r = (i - rectangle.row_begin) / row_cell, first = rectangle.row_begin + r * row_cell;
        add_cells(WeightRow<T>{weights.data() + (i - row) * keys, 0, keys}, key_cell, sums.data(),
                  map.max.as<T>() + r * cell_keys);
        if (i + 1 == std::min(first + row_cell, block.row_end)) {
          means_of(sums, i + 1 - first, keys, key_cell, map.mean.as<T>() + r * cell_keys);
        }
      }
    }
  });
  return map;
}

}  // namespace

Tensor weights_in(ConstTensorView query, ConstTensorView key, const Rectangle& rectangle,
                  const AttentionOptions& options, const std::optional<ConstTensorView>& lse) try {
  const Problem problem = analysis_problem("weights_in", query, key, options);
  check_rectangle(problem, rectangle);
  const auto rows = lse ? std::optional(full_lse(problem, *lse)) : std::nullopt;
  if (problem.query.device() != Device{}) {
    Tensor weights = Tensor::uninitialized({problem.batch, problem.heads, rectangle.row_end - rectangle.row_begin,
                                            rectangle.key_end - rectangle.key_begin},
                                           problem.dtype() == DType::f64 ? DType::f64 : DType::f32);
    weights_on_device(problem, rectangle, rows, weights);
    return weights;
  }
  return problem.dtype() == DType::f64 ? weights_of<double>(problem, rectangle, rows)
                                       : weights_of<float>(problem, rectangle, rows);
} catch (...) {
  throw_own_error("weights_in");
}

void mean_weights(ConstTensorView query, ConstTensorView key, ConstTensorView lse, TensorView mean,
                  const AttentionOptions& options) try {
  const Problem problem = analysis_problem("mean_weights", query, key, options);
  const ConstTensorView rows = full_lse(problem, lse);
  check_device(problem, "lse", rows);
  check_same_type(problem, "the mean", mean);
  check_storage(problem, "the mean", mean);
  const Dims sizes{problem.batch, problem.query_len, problem.key_len};
  check_sizes(problem, "the mean", mean, query.rank() == 2 ? Dims{sizes[1], sizes[2]} : sizes);
  for (const auto& [name, input] : {std::pair("query", query), std::pair("key", key), std::pair("lse", lse)}) {
    if (share_memory(mean, input)) {
      invalid(problem, "the mean overlaps ", name, " in memory");
    }
  }
  const TensorView target = query.rank() == 2 ? mean.unsqueeze(0) : mean;
  if (problem.query.device() != Device{}) {
    return mean_weights_on_device(problem, rows, target);
  }
  problem.dtype() == DType::f64 ? write_mean<double>(problem, rows, target) : write_mean<float>(problem, rows, target);
} catch (...) {
  throw_own_error("mean_weights");
}

TileMap tile_map(ConstTensorView query, ConstTensorView key, ConstTensorView lse, std::int64_t batch, std::int64_t head,
                 const Rectangle& rectangle, std::int64_t row_cell, std::int64_t key_cell,
                 const AttentionOptions& options) try {
  const Problem problem = analysis_problem("tile_map", query, key, options);
  check_rectangle(problem, rectangle);
  const ConstTensorView rows = full_lse(problem, lse);
  if (batch < 0 || batch >= problem.batch || head < 0 || head >= problem.heads) {
    invalid(problem, "batch ", batch, " and head ", head, " must be below ", problem.batch, " and ", problem.heads);
  }
  if (row_cell < 1 || key_cell < 1) {
    invalid(problem, "cells are ", row_cell, " by ", key_cell, ", expected 1 or more");
  }
  // A cell that covers everything need not be larger, and no sum with its size overflows.
  row_cell = std::clamp<std::int64_t>(rectangle.row_end - rectangle.row_begin, 1, row_cell);
  key_cell = std::clamp<std::int64_t>(rectangle.key_end - rectangle.key_begin, 1, key_cell);
  if (problem.query.device() != Device{}) {
    const Dims cells{ceil_div(rectangle.row_end - rectangle.row_begin, row_cell),
                     ceil_div(rectangle.key_end - rectangle.key_begin, key_cell)};
    TileMap map{Tensor(cells, rows.dtype()), Tensor(cells, rows.dtype())};
    map_on_device(problem, batch, head, rectangle, row_cell, key_cell, rows, map);
    return map;
  }
  const ConstTensorView of_head = rows.select(0, batch).select(0, head);
  return problem.dtype() == DType::f64 ? map_of<double>(problem, batch, head, rectangle, row_cell, key_cell, of_head)
                                       : map_of<float>(problem, batch, head, rectangle, row_cell, key_cell, of_head);
} catch (...) {
  throw_own_error("tile_map");
}

}  // namespace headway
