// What weights say, where query and key lie on a GPU. The walks over scores and the sums are kernels, queued on the
// call's stream; results lie in host memory, and bringing them there is the only wait. Sums take a bounded part of the
// device's memory: heads come in groups, and cells that go elsewhere in bands of rows. Neither changes a bit.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "analysis/on_device.h"
#include "core/ceil_div.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"
#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/analysis_pieces.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/scores.h"
#include "headway/threads.h"

namespace headway::cuda {
namespace {

constexpr std::int64_t most_chunks = 128;                      // of a head's rows
constexpr std::int64_t sums_limit = std::int64_t{512} << 20;   // bytes, unless one head or row needs more
constexpr std::int64_t parts_limit = std::int64_t{128} << 20;  // of weights on their way to the host

std::size_t bytes_of(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

// Device memory for results, which are copied to their tensors in the end.
class ResultMemory {
 public:
  // Tensors hold what a result is that nobody writes, so that goes there first: a byte, repeated.
  struct Result {
    Tensor* tensor;
    int byte = 0;
  };

  ResultMemory(std::vector<Result> results, int device, cudaStream_t stream, std::string_view operation)
      : results_(std::move(results)),
        memory_(total(results_), device, stream, operation),
        stream_(stream),
        operation_(operation) {
    for (const auto& [tensor, byte] : results_) {
      places_.push_back(memory_.take(size(*tensor)));
      if (size(*tensor) > 0) {
        check(cudaMemsetAsync(places_.back(), byte, size(*tensor), stream_), operation_, "clearing results");
      }
    }
  }

  void* of(const Tensor& tensor) const {
    const auto found =
        std::find_if(results_.begin(), results_.end(), [&](const Result& r) { return r.tensor == &tensor; });
    return places_[static_cast<std::size_t>(found - results_.begin())];
  }

  void fetch() const {
    // While the device computes: memory that has not been touched yet would make the copies slow.
    for (const Result& result : results_) {
      if (size(*result.tensor) > 0) {
        std::memset(result.tensor->data(), result.byte, size(*result.tensor));
      }
    }
    for (std::size_t n = 0; n < results_.size(); ++n) {
      Tensor& tensor = *results_[n].tensor;
      if (size(tensor) > 0) {
        check(cudaMemcpyAsync(tensor.data(), places_[n], size(tensor), cudaMemcpyDeviceToHost, stream_), operation_,
              "fetching results");
      }
    }
    check(cudaStreamSynchronize(stream_), operation_, "waiting for results");
  }

 private:
  static std::size_t size(const Tensor& tensor) {
    return static_cast<std::size_t>(tensor.elements()) * size_of(tensor.dtype());
  }
  static std::size_t total(const std::vector<Result>& results) {
    std::size_t bytes = 0;
    for (const Result& result : results) {
      bytes += Workspace::rounded(size(*result.tensor));
    }
    return bytes;
  }

  std::vector<Result> results_;
  Workspace memory_;
  std::vector<void*> places_;
  cudaStream_t stream_;
  std::string_view operation_;
};

// Cells of a map, and where they go: to a device's memory [B,H,R,C], or row by row to a taker.
struct Cells {
  std::int64_t row_cell = 1, key_cell = 1;
  bool wanted = false;
  std::byte *mean = nullptr, *max = nullptr;
  const CellTaker* taker = nullptr;
};

// One call: its inputs in place, and the walks over them.
class Walks {
 public:
  Walks(const Problem& problem, const Rectangle& part, const std::optional<ConstTensorView>& lse)
      : problem_(problem),
        scope_(problem.query.device().index, problem.operation),
        stream_(static_cast<cudaStream_t>(problem.stream)),
        wide_(problem.dtype() == DType::f64),
        inputs_(lengths_bytes(problem) + lse_bytes(lse), device(), stream_, problem.operation) {
    static_cast<Arguments&>(arguments) = arguments_of(problem);
    place_lengths(problem, arguments, inputs_, stream_);
    if (lse) {
      place_lse(*lse);
    }
    arguments.row_begin = part.row_begin;
    arguments.row_end = part.row_end;
    arguments.key_begin = part.key_begin;
    arguments.key_end = part.key_end;
    arguments.row_cell = std::max<std::int64_t>(part.row_end - part.row_begin, 1);
    arguments.key_cell = std::max<std::int64_t>(part.key_end - part.key_begin, 1);
  }

  int device() const { return problem_.query.device().index; }
  cudaStream_t stream() const { return stream_; }
  std::int64_t number_bytes() const { return wide_ ? 8 : 4; }

  // Statistics of the rows go where the arguments say; `received` [B,H,Sk], or none.
  void walk(std::int64_t first_head, std::int64_t head_count, void* received, const Cells& cells);

  // Every weight of the rectangle.
  void store(Tensor& weights);

  void compare(void* mean, void* similarity, std::int64_t cells);

  AnalysisArguments arguments{};

 private:
  static std::size_t lse_bytes(const std::optional<ConstTensorView>& lse) {
    const bool on_host = lse && lse->device() == Device{};
    return on_host ? Workspace::rounded(static_cast<std::size_t>(lse->elements()) * size_of(lse->dtype())) : 0;
  }
  void place_lse(const ConstTensorView& lse);

  void queue(std::int64_t first_row, std::int64_t end_row, bool in_chunks);
  void queue(const Launch& launch, const AnalysisArguments& all);
  void queue_band(std::int64_t head_count, std::int64_t first_row, std::int64_t end_row, const Cells& cells);
  void hand_over(const CellTaker& taker, std::int64_t head_count, std::int64_t first_cell_row, std::int64_t cell_rows,
                 const void* mean, const void* max);

  void clear(void* memory, std::int64_t bytes) {
    if (bytes > 0) {
      check(cudaMemsetAsync(memory, 0, bytes_of(bytes), stream_), problem_.operation, "clearing sums");
    }
  }

  const Problem& problem_;
  DeviceScope scope_;
  cudaStream_t stream_;
  bool wide_;
  Workspace inputs_;
  Tensor sent_lse_;  // stays until the copy is done
};

void Walks::place_lse(const ConstTensorView& lse) {
  if (lse.device() != Device{}) {
    arguments.given_lse = row_values_of(lse);
    return;
  }
  sent_lse_ = convert(lse, lse.dtype());
  const std::size_t bytes = static_cast<std::size_t>(lse.elements()) * size_of(lse.dtype());
  void* target = inputs_.take(bytes);
  if (bytes > 0) {
    check(cudaMemcpyAsync(target, sent_lse_.data(), bytes, cudaMemcpyHostToDevice, stream_), problem_.operation,
          "sending lse");
  }
  arguments.given_lse = row_values_of(ConstTensorView(target, lse.dtype(), lse.sizes(), problem_.query.device()));
}

// The walk over rows [first_row, end_row) of the arguments' heads.
void Walks::queue(std::int64_t first_row, std::int64_t end_row, bool in_chunks) {
  AnalysisArguments band = arguments;
  band.row_begin = first_row;
  band.row_end = end_row;
  band.tiles = ceil_div(end_row - first_row, analysis_rows);
  if (!in_chunks) {
    band.chunk_tiles = 1;
    band.chunks = band.tiles;
  }
  const std::optional<Launch> simple = choose_simple_analysis(problem_, band);
  if (!simple) {
    queue(choose_analysis(problem_, band), band);
    return;
  }
  const auto rows = static_cast<std::size_t>(band.head_count * (end_row - first_row));
  const auto tiles = static_cast<std::size_t>(band.head_count * band.tiles);
  Workspace left(Workspace::rounded(2 * sizeof(float) * rows) + Workspace::rounded(3 * sizeof(double) * rows) +
                     Workspace::rounded(sizeof(int) * tiles),
                 device(), stream_, problem_.operation);
  band.row_softmax = left.take_as<float>(2 * rows);
  band.row_sums = left.take_as<double>(3 * rows);
  band.left_out = left.take_as<int>(tiles);
  const Launch others = choose_analysis(problem_, band);
  band.part = AnalysisPart::softmax_of_edges;
  queue(others, band);
  queue(*simple, band);
  band.part = AnalysisPart::edges;
  queue(others, band);
}

void Walks::queue(const Launch& launch, const AnalysisArguments& all) {
  if (launch.tasks > 0) {
    allow_shared(launch.kernel, launch.shared_bytes, problem_.operation);
    check(launch_analysis(launch, all, stream_), problem_.operation, text("launching ", launch.name));
  }
}

void Walks::walk(std::int64_t first_head, std::int64_t head_count, void* received, const Cells& cells) {
  const std::int64_t rows = arguments.row_end - arguments.row_begin, keys = arguments.key_end - arguments.key_begin;
  arguments.row_cell = cells.row_cell;
  arguments.key_cell = cells.key_cell;
  arguments.columns = cells.wanted ? ceil_div(keys, cells.key_cell) : 0;
  const std::int64_t piece_bytes = arguments.columns * (static_cast<std::int64_t>(sizeof(double)) + number_bytes());

  // Rows at once: all of them, or, for a taker, whole rows of cells within the limit.
  std::int64_t band = std::max<std::int64_t>(rows, 1);
  if (cells.taker != nullptr) {
    const std::int64_t pieces = sums_limit / std::max<std::int64_t>(piece_bytes, 1);
    const std::int64_t cell_rows = pieces / (1 + ceil_div(cells.row_cell, analysis_rows));
    band = std::max<std::int64_t>(std::min(cell_rows, ceil_div(rows, cells.row_cell)), 1) * cells.row_cell;
  }
  arguments.pieces = cells.wanted ? piece_count(std::min(band, rows), cells.row_cell) : 0;
  const std::int64_t tiles = ceil_div(std::min(band, rows), analysis_rows);
  arguments.chunk_tiles = std::max<std::int64_t>(ceil_div(tiles, most_chunks), 1);
  arguments.chunks = ceil_div(tiles, arguments.chunk_tiles);

  const std::int64_t received_bytes = received == nullptr ? 0 : arguments.chunks * keys * sizeof(double);
  const std::int64_t head_bytes = received_bytes + arguments.pieces * piece_bytes;
  const std::int64_t group = std::clamp<std::int64_t>(sums_limit / std::max<std::int64_t>(head_bytes, 1), 1,
                                                      std::max<std::int64_t>(head_count, 1));
  for (std::int64_t head = 0; head < head_count; head += group) {
    const std::int64_t count = std::min(group, head_count - head);
    Workspace sums(Workspace::rounded(bytes_of(count * received_bytes)) +
                       Workspace::rounded(bytes_of(count * arguments.pieces * arguments.columns * 8)) +
                       Workspace::rounded(bytes_of(count * arguments.pieces * arguments.columns * number_bytes())),
                   device(), stream_, problem_.operation);
    arguments.first_head = first_head + head;
    arguments.head_count = count;
    arguments.received =
        received == nullptr ? nullptr : static_cast<double*>(sums.take(bytes_of(count * received_bytes)));
    clear(arguments.received, count * received_bytes);
    if (cells.wanted) {
      const std::int64_t numbers = count * arguments.pieces * arguments.columns;
      arguments.cell_sums = static_cast<double*>(sums.take(bytes_of(numbers * 8)));
      arguments.cell_highest = sums.take(bytes_of(numbers * number_bytes()));
    }
    for (std::int64_t row = 0; row < rows; row += band) {
      queue_band(count, arguments.row_begin + row, arguments.row_begin + std::min(row + band, rows), cells);
    }
    if (received != nullptr) {
      const ReceivedArguments all{arguments.first_head, count, arguments.chunks, keys, arguments.received, received};
      check(launch_received(all, wide_, stream_), problem_.operation, "summing what keys received");
    }
  }
}

void Walks::queue_band(std::int64_t head_count, std::int64_t first_row, std::int64_t end_row, const Cells& cells) {
  if (cells.wanted) {
    const std::int64_t numbers = head_count * arguments.pieces * arguments.columns;
    clear(arguments.cell_sums, numbers * 8);
    clear(arguments.cell_highest, numbers * number_bytes());
  }
  queue(first_row, end_row, arguments.received != nullptr);
  if (!cells.wanted) {
    return;
  }
  const std::int64_t rows = end_row - first_row, cell_rows = ceil_div(rows, cells.row_cell);
  const std::int64_t bytes = head_count * cell_rows * arguments.columns * number_bytes();
  Workspace maps(cells.taker == nullptr ? 0 : 2 * Workspace::rounded(bytes_of(bytes)), device(), stream_,
                 problem_.operation);
  const std::int64_t before = arguments.first_head * cell_rows * arguments.columns * number_bytes();
  void* mean = cells.taker == nullptr ? cells.mean + before : maps.take(bytes_of(bytes));
  void* max = cells.taker == nullptr ? cells.max + before : maps.take(bytes_of(bytes));
  const std::int64_t keys = arguments.key_end - arguments.key_begin;
  check(launch_cells({.head_count = head_count,
                      .rows = rows,
                      .keys = keys,
                      .row_cell = cells.row_cell,
                      .key_cell = cells.key_cell,
                      .cell_rows = cell_rows,
                      .columns = arguments.columns,
                      .pieces = arguments.pieces,
                      .sums = arguments.cell_sums,
                      .highest = arguments.cell_highest,
                      .mean = mean,
                      .max = max},
                     wide_, stream_),
        problem_.operation, "summing the cells of maps");
  if (cells.taker != nullptr) {
    hand_over(*cells.taker, head_count, (first_row - arguments.row_begin) / cells.row_cell, cell_rows, mean, max);
  }
}

// Waits for a band of cells.
void Walks::hand_over(const CellTaker& taker, std::int64_t head_count, std::int64_t first_cell_row,
                      std::int64_t cell_rows, const void* mean, const void* max) {
  const Dims sizes{head_count * cell_rows, arguments.columns};
  const DType dtype = wide_ ? DType::f64 : DType::f32;
  Tensor means = Tensor::uninitialized(sizes, dtype), largest = Tensor::uninitialized(sizes, dtype);
  const std::size_t bytes = static_cast<std::size_t>(means.elements()) * size_of(dtype);
  if (bytes == 0) {
    return;
  }
  for (const auto& [tensor, from] : {std::pair(&means, mean), std::pair(&largest, max)}) {
    check(cudaMemcpyAsync(tensor->data(), from, bytes, cudaMemcpyDeviceToHost, stream_), problem_.operation,
          "fetching the cells of maps");
  }
  check(cudaStreamSynchronize(stream_), problem_.operation, "waiting for the cells of maps");
  parallel_for(head_count * cell_rows, get_threads(), [&](std::int64_t at, int) {
    Tensor row = Tensor::uninitialized({2, arguments.columns}, DType::f64);
    copy(means.view().slice(0, at, at + 1), row.view().slice(0, 0, 1));
    copy(largest.view().slice(0, at, at + 1), row.view().slice(0, 1, 2));
    const auto columns = static_cast<std::size_t>(arguments.columns);
    taker.take(arguments.first_head + at / cell_rows, first_cell_row + at % cell_rows,
               std::span(row.as<double>(), columns), std::span(row.as<double>() + columns, columns));
  });
}

void Walks::store(Tensor& weights) {
  const std::int64_t rows = weights.size(2), keys = weights.size(3), heads = weights.size(0) * weights.size(1);
  if (weights.elements() == 0) {
    return;
  }
  const std::int64_t row_bytes = keys * number_bytes();
  const std::int64_t group = std::clamp<std::int64_t>(parts_limit / (rows * row_bytes), 1, heads);
  const std::int64_t whole_tiles = parts_limit / row_bytes / analysis_rows * analysis_rows;
  const std::int64_t band = std::clamp<std::int64_t>(whole_tiles, analysis_rows, std::max(rows, analysis_rows));
  Workspace part(bytes_of(group * std::min(band, rows) * row_bytes), device(), stream_, problem_.operation);
  arguments.weights = part.take(bytes_of(group * std::min(band, rows) * row_bytes));
  for (std::int64_t head = 0; head < heads; head += group) {
    arguments.first_head = head;
    arguments.head_count = std::min(group, heads - head);
    for (std::int64_t row = 0; row < rows; row += band) {
      const std::int64_t count = std::min(band, rows - row);
      const std::int64_t bytes = arguments.head_count * count * row_bytes;
      clear(arguments.weights, bytes);
      queue(arguments.row_begin + row, arguments.row_begin + row + count, false);
      check(cudaMemcpyAsync(static_cast<std::byte*>(weights.data()) + (head * rows + row) * row_bytes,
                            arguments.weights, bytes_of(bytes), cudaMemcpyDeviceToHost, stream_),
            problem_.operation, "fetching weights");
    }
  }
  check(cudaStreamSynchronize(stream_), problem_.operation, "waiting for weights");
}

void Walks::compare(void* mean, void* similarity, std::int64_t cells) {
  const std::int64_t pairs = problem_.batch * problem_.heads * problem_.heads;
  Workspace memory(bytes_of(pairs * 8), device(), stream_, problem_.operation);
  const SimilarityArguments all{
      problem_.batch, problem_.heads, cells, mean, static_cast<double*>(memory.take(bytes_of(pairs * 8))), similarity};
  check(launch_similarity(all, wide_, stream_), problem_.operation, "comparing maps");
}

}  // namespace
}  // namespace headway::cuda

namespace headway {

void analyze_on_device(const Problem& problem, const AnalysisRequest& request, const CellTaker& taker,
                       Analysis& result) {
  if (problem.progress && !problem.progress(0.0)) {
    throw Cancelled(text(problem.operation, ": cancelled by the caller before the work was queued"));
  }
  ProgressMeter progress(problem.operation, problem.progress, 1);
  cuda::Walks walks(problem, {0, problem.query_len, 0, problem.key_len}, {});
  cuda::ResultMemory memory({{&result.lse},
                             {&result.entropy},
                             {&result.distance},
                             {&result.first},
                             {&result.diagonal},
                             {&result.near},
                             {&result.received},
                             {&result.top_keys, 0xFF},
                             {&result.top_weights},
                             {&result.map_mean},
                             {&result.map_max},
                             {&result.similarity}},
                            walks.device(), walks.stream(), problem.operation);
  cuda::AnalysisArguments& arguments = walks.arguments;
  arguments.lse = memory.of(result.lse);
  arguments.entropy = memory.of(result.entropy);
  arguments.distance = memory.of(result.distance);
  arguments.first = memory.of(result.first);
  arguments.diagonal = memory.of(result.diagonal);
  arguments.near = memory.of(result.near);
  arguments.near_left = std::min(request.near.left.value_or(RangeRule::unlimited), RangeRule::unlimited);
  arguments.near_right = std::min(request.near.right.value_or(RangeRule::unlimited), RangeRule::unlimited);
  arguments.top = request.top;
  arguments.top_weights = memory.of(result.top_weights);
  arguments.top_keys = static_cast<std::int64_t*>(memory.of(result.top_keys));
  const std::int64_t map_cells = result.map_mean.size(2) * result.map_mean.size(3);
  const cuda::Cells cells{.row_cell = result.row_cell,
                          .key_cell = result.key_cell,
                          .wanted = taker.take || map_cells > 0,
                          .mean = static_cast<std::byte*>(memory.of(result.map_mean)),
                          .max = static_cast<std::byte*>(memory.of(result.map_max)),
                          .taker = taker.take ? &taker : nullptr};
  walks.walk(0, problem.batch * problem.heads, memory.of(result.received), cells);
  if (map_cells > 0) {
    walks.compare(memory.of(result.map_mean), memory.of(result.similarity), map_cells);
  }
  memory.fetch();
  progress.advance();
}

void weights_on_device(const Problem& problem, const Rectangle& rectangle, const std::optional<ConstTensorView>& lse,
                       Tensor& weights) {
  cuda::Walks(problem, rectangle, lse).store(weights);
}

void map_on_device(const Problem& problem, std::int64_t batch, std::int64_t head, const Rectangle& rectangle,
                   std::int64_t row_cell, std::int64_t key_cell, const ConstTensorView& lse, TileMap& map) {
  const CellTaker taker{
      .row_cell = row_cell,
      .key_cell = key_cell,
      .take = [&](std::int64_t, std::int64_t row, std::span<const double> mean, std::span<const double> max) {
        const Dims sizes{1, static_cast<std::int64_t>(mean.size())};
        copy(ConstTensorView(mean.data(), sizes), map.mean.view().slice(0, row, row + 1));
        copy(ConstTensorView(max.data(), sizes), map.max.view().slice(0, row, row + 1));
      }};
  cuda::Walks walks(problem, rectangle, lse);
  walks.walk(batch * problem.heads + head, 1, nullptr,
             {.row_cell = row_cell, .key_cell = key_cell, .wanted = true, .taker = &taker});
}

}  // namespace headway
