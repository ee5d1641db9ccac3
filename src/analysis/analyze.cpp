// The statistics of a whole call. On a device, its engine computes everything. In host memory heads come one after the
// other; the rows of a head are cut into chunks, the unit of parallel work, and a chunk walks its rows in blocks whose
// weights an engine writes into the chunk's own buffer. Chunks depend on the shape alone and their sums are added in
// order, so the number of threads changes no bit.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <stdexcept>
#include <vector>

#include "analysis/cells.h"
#include "analysis/on_device.h"
#include "analysis/row_statistics.h"
#include "analysis/slice.h"
#include "core/ceil_div.h"
#include "core/elements.h"
#include "core/key_range.h"
#include "core/linear.h"
#include "core/out_of_memory.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"
#include "headway/threads.h"

namespace headway {
namespace {

constexpr std::int64_t most_chunks = 64, least_rows = 16;  // of a chunk; each asks an engine, which has its price
constexpr std::int64_t most_cells = 512;

// The rows or keys of one cell of the maps, if `cells` of them cover `size`.
std::int64_t cell_size(std::int64_t size, std::int64_t cells) {
  return cells == 0 ? std::max<std::int64_t>(size, 1) : std::max<std::int64_t>(ceil_div(size, cells), 1);
}

// Allocates the results, with the values of rows that have no weights. A device writes all of them: without values.
Analysis empty_result(const Problem& problem, const AnalysisRequest& request, const CellTaker& taker) {
  const bool filled = problem.query.device() == Device{};
  const auto results = [&](const Dims& sizes, DType dtype) {
    return filled ? Tensor(sizes, dtype) : Tensor::uninitialized(sizes, dtype);
  };
  const DType dtype = problem.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Dims rows{problem.batch, problem.heads, problem.query_len};
  Analysis result;
  for (Tensor* of_rows :
       {&result.lse, &result.entropy, &result.distance, &result.first, &result.diagonal, &result.near}) {
    *of_rows = results(rows, dtype);
  }
  result.received = results({problem.batch, problem.heads, problem.key_len}, dtype);
  Dims listed = rows;
  listed.push_back(request.top);
  result.top_keys = Tensor::uninitialized(listed, DType::i64);
  if (filled) {
    std::fill_n(result.top_keys.as<std::int64_t>(), result.top_keys.elements(), -1);
  }
  result.top_weights = results(listed, dtype);
  result.row_cell = taker.take ? taker.row_cell : cell_size(problem.query_len, request.cells);
  result.key_cell = taker.take ? taker.key_cell : cell_size(problem.key_len, request.cells);
  Dims cells{problem.batch, problem.heads, 0, 0};
  if (!taker.take && request.cells != 0) {
    cells[2] = ceil_div(problem.query_len, result.row_cell);
    cells[3] = ceil_div(problem.key_len, result.key_cell);
  }
  result.map_mean = results(cells, dtype);
  result.map_max = results(cells, dtype);
  result.similarity = results({problem.batch, problem.heads, problem.heads}, dtype);
  return result;
}

template <class T>
class Analyzer {
 public:
  // Cells go into the result's maps or, if there is a consumer, to it, in the size that it asks for.
  Analyzer(const Problem& problem, const AnalysisRequest& request, const CellTaker& taker)
      : problem_(problem), request_(request), taker_(taker), result_(empty_result(problem, request, taker)) {
    const bool maps = taker.take || request.cells != 0;
    map_keys_ = maps ? ceil_div(problem.key_len, result_.key_cell) : 0;
    // Whole rows of cells, so that no two chunks share one.
    const std::int64_t unit = maps ? result_.row_cell : rows_at_once(problem.key_len);
    const std::int64_t units = ceil_div(std::max<std::int64_t>(problem.query_len, 1), unit);
    chunk_rows_ = std::max(ceil_div(units, most_chunks), ceil_div(least_rows, unit)) * unit;
    chunks_ = ceil_div(problem.query_len, chunk_rows_);
  }

  Analysis run() {
    SharedProgress progress(problem_.operation, problem_.progress,
                            problem_.batch * problem_.heads * blocks_of_a_head());
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      for (std::int64_t h = 0; h < problem_.heads; ++h) {
        analyze_head(b, h, progress);
      }
      compare_heads(b);
    }
    progress.finish();
    return std::move(result_);
  }

 private:
  // A row of cells being accumulated: sums, which become means, and maxima.
  struct CellRow {
    std::vector<double> sums;
    std::vector<T> highest;
  };

  // The first element of (b, h) in one of the results.
  template <class Element>
  Element* at(Tensor& tensor, std::int64_t b, std::int64_t h) {
    const std::int64_t heads = problem_.batch * problem_.heads;
    return tensor.as<Element>() + (b * problem_.heads + h) * (tensor.elements() / std::max<std::int64_t>(heads, 1));
  }

  void analyze_head(std::int64_t b, std::int64_t h, SharedProgress& progress) {
    const HeadInputs inputs(problem_, b, h);
    std::vector<double> received(static_cast<std::size_t>(chunks_ * problem_.key_len));
    parallel_for(chunks_, get_threads(), [&](std::int64_t chunk, int worker) {
      analyze_chunk(b, h, chunk, inputs, received.data() + chunk * problem_.key_len, [&] {
        try {
          progress.task_done(worker);
        } catch (...) {
          stopped_ = true;
          throw;
        }
      });
    });
    T* sums = at<T>(result_.received, b, h);
    for (std::int64_t j = 0; j < problem_.key_len; ++j) {
      double sum = 0;
      for (std::int64_t chunk = 0; chunk < chunks_; ++chunk) {
        sum += received[static_cast<std::size_t>(chunk * problem_.key_len + j)];
      }
      sums[j] = static_cast<T>(sum);
    }
  }

  std::int64_t blocks_of_a_head() const {
    const std::int64_t at_once = rows_at_once(problem_.key_len);
    std::int64_t blocks = 0;
    for (std::int64_t row = 0; row < problem_.query_len; row += chunk_rows_) {
      blocks += ceil_div(std::min(chunk_rows_, problem_.query_len - row), at_once);
    }
    return blocks;
  }

  // `block_done` may throw on the calling thread; the others then stop at their next block.
  template <class BlockDone>
  void analyze_chunk(std::int64_t b, std::int64_t h, std::int64_t chunk, const HeadInputs& inputs, double* received,
                     const BlockDone& block_done) {
    const std::int64_t begin = chunk * chunk_rows_, end = std::min(begin + chunk_rows_, problem_.query_len);
    const std::int64_t at_once = rows_at_once(problem_.key_len);
    Tensor weights = Tensor::uninitialized({at_once, problem_.key_len}, dtype_of<T>);
    CellRow cells{std::vector<double>(static_cast<std::size_t>(map_keys_)),
                  std::vector<T>(static_cast<std::size_t>(map_keys_))};
    for (std::int64_t row = begin; row < end && !stopped_; row += at_once) {
      const std::int64_t block_end = std::min(row + at_once, end);
      const Rectangle part{row, block_end, 0, problem_.key_len};
      const Slice slice(problem_, b, h, part, inputs.query.slice(0, row, block_end), inputs.key);
      slice.weights(weights.view().slice(0, 0, block_end - row),
                    TensorView(at<T>(result_.lse, b, h) + row, {block_end - row}));
      const Sequence sequence = headway::sequence(slice.problem(), 0);
      for (std::int64_t i = row; i < block_end; ++i) {
        const KeyRange range = key_range(slice.problem(), sequence, 0, i - row);
        const WeightRow<T> current{weights.template as<T>() + (i - row) * problem_.key_len, range.begin, range.end};
        analyze_row(b, h, i, sequence.offset + i - row, current);
        add_received(current, received);
        if (map_keys_ != 0) {
          add_cells(current, result_.key_cell, cells.sums.data(), cells.highest.data());
          if ((i + 1) % result_.row_cell == 0 || i + 1 == end) {
            end_cells(b, h, i, cells);
          }
        }
      }
      block_done();
    }
  }

  // Turns the sums into means and passes the row of cells on; then the next row begins.
  void end_cells(std::int64_t b, std::int64_t h, std::int64_t last_row, CellRow& cells) {
    const std::int64_t row = last_row / result_.row_cell, rows = last_row % result_.row_cell + 1;
    for (std::int64_t c = 0; c < map_keys_; ++c) {
      const std::int64_t keys = std::min(result_.key_cell, problem_.key_len - c * result_.key_cell);
      cells.sums[static_cast<std::size_t>(c)] /= static_cast<double>(rows * keys);
    }
    if (taker_.take) {
      const std::vector<double> highest(cells.highest.begin(), cells.highest.end());
      taker_.take(b * problem_.heads + h, row, cells.sums, highest);
    } else {
      std::transform(cells.sums.begin(), cells.sums.end(), at<T>(result_.map_mean, b, h) + row * map_keys_,
                     [](double mean) { return static_cast<T>(mean); });
      std::copy(cells.highest.begin(), cells.highest.end(), at<T>(result_.map_max, b, h) + row * map_keys_);
    }
    std::fill(cells.sums.begin(), cells.sums.end(), 0.0);
    std::fill(cells.highest.begin(), cells.highest.end(), T{0});
  }

  void analyze_row(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t position, const WeightRow<T>& row) {
    TopList<T> top{at<std::int64_t>(result_.top_keys, b, h) + i * request_.top,
                   at<T>(result_.top_weights, b, h) + i * request_.top, request_.top};
    const RowSums sums = sum_row(row, position, top);
    const auto weight_of = [&](std::int64_t j) { return j >= row.begin && j < row.end ? row.p[j] : T{0}; };
    const auto side = [](const std::optional<std::int64_t>& width) {  // wide enough, and no sum with it overflows
      return std::min(width.value_or(RangeRule::unlimited), RangeRule::unlimited);
    };
    const std::int64_t left = side(request_.near.left), right = side(request_.near.right);
    at<T>(result_.entropy, b, h)[i] = static_cast<T>(sums.entropy);
    at<T>(result_.distance, b, h)[i] = static_cast<T>(sums.distance);
    at<T>(result_.first, b, h)[i] = weight_of(0);
    at<T>(result_.diagonal, b, h)[i] = weight_of(position);
    at<T>(result_.near, b, h)[i] = static_cast<T>(sum_between(row, position - left, position + right + 1));
  }

  // The cosines of all pairs of maps: the matrix product of the maps [H, cells] with themselves, divided by their
  // lengths, the roots of its diagonal. It is symmetric to the bit, as every sum is taken in the order of the cells.
  void compare_heads(std::int64_t b) {
    const std::int64_t heads = problem_.heads, cells = result_.map_mean.size(2) * result_.map_mean.size(3);
    if (cells == 0 || heads == 0) {
      return;  // without maps all are 0
    }
    const T* maps = at<T>(result_.map_mean, b, 0);
    T* similarity = at<T>(result_.similarity, b, 0);
    linear(problem_.engine, ConstTensorView(maps, dtype_of<T>, {1, heads, cells}),
           ConstTensorView(maps, dtype_of<T>, {cells, heads}, {1, cells}), {},
           TensorView(similarity, dtype_of<T>, {1, heads, heads}), {.operation = problem_.operation});
    std::vector<double> lengths(static_cast<std::size_t>(heads));
    for (std::int64_t h = 0; h < heads; ++h) {
      lengths[static_cast<std::size_t>(h)] = std::sqrt(static_cast<double>(similarity[h * heads + h]));
    }
    parallel_for(heads, get_threads(), [&](std::int64_t g, int) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const double scale = lengths[static_cast<std::size_t>(g)] * lengths[static_cast<std::size_t>(h)];
        const double cosine = scale == 0 ? 0 : static_cast<double>(similarity[g * heads + h]) / scale;
        similarity[g * heads + h] = static_cast<T>(cosine > 1 ? 1 : cosine);
      }
    });
  }

  const Problem& problem_;
  const AnalysisRequest& request_;
  const CellTaker& taker_;
  Analysis result_;
  std::int64_t map_keys_ = 0;  // cells in a row of a map
  std::int64_t chunk_rows_ = 1, chunks_ = 0;
  std::atomic<bool> stopped_ = false;
};

void check(const Problem& problem, const AnalysisRequest& request) {
  if (request.top < 0) {
    throw InvalidArgument(text(problem.operation, ": top is ", request.top, ", expected 0 or more"));
  }
  if (request.cells < 0 || request.cells > most_cells) {
    throw InvalidArgument(text(problem.operation, ": cells is ", request.cells, ", expected 0 to ", most_cells));
  }
  for (const auto& side : {request.near.left, request.near.right}) {
    if (side && *side < 0) {
      throw InvalidArgument(
          text(problem.operation, ": near has ", *side, ", expected 0 or more, or none for unlimited"));
    }
  }
}

}  // namespace

double mean_over_rows(ConstTensorView statistic, std::int64_t batch, std::int64_t head) {
  const ConstTensorView rows = statistic.select(0, batch).select(0, head);
  double sum = 0;
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    sum += load_float(rows, i * rows.stride(0));
  }
  return sum / static_cast<double>(std::max<std::int64_t>(rows.size(0), 1));
}

Analysis analyze(const Problem& problem, const AnalysisRequest& request, const CellTaker& taker) {
  check(problem, request);
  if (problem.query.device() != Device{}) {
    Analysis result = empty_result(problem, request, taker);
    analyze_on_device(problem, request, taker, result);
    return result;
  }
  return problem.dtype() == DType::f64 ? Analyzer<double>(problem, request, taker).run()
                                       : Analyzer<float>(problem, request, taker).run();
}

Analysis analyze(ConstTensorView query, ConstTensorView key, const AttentionOptions& options,
                 const AnalysisRequest& request) try {
  return analyze(analysis_problem("analyze", query, key, options), request, {});
} catch (...) {
  throw_own_error("analyze");
}

}  // namespace headway
