#include "view/content.h"

#include <algorithm>
#include <cmath>

#include "analysis/slice.h"
#include "core/ceil_div.h"
#include "core/elements.h"
#include "core/plan.h"
#include "core/progress.h"
#include "core/text.h"
#include "headway/analysis.h"

namespace headway::view {
namespace {

// Bytes of numbers that a page of 5 MB has room for, even if packing does not shrink them and base64 adds a third. What
// is text in the page, three quarters of its size, is taken from them.
constexpr std::int64_t number_bytes = 3'600'000, head_text_bytes = 190, most_token_bytes = 1'600'000;
constexpr std::int64_t most_heads = 16'384;                 // of which each still gets a map of a few cells
constexpr std::int64_t most_cells = 512, most_bins = 1024;  // along a map, of a profile
constexpr std::int64_t cell_bytes = 4, bin_bytes = 2, top_entry_bytes = 8;

void check_names(const char* operation, const char* what, const std::vector<std::string>& names, std::int64_t count) {
  if (!names.empty() && static_cast<std::int64_t>(names.size()) != count) {
    throw InvalidArgument(text(operation, ": ", what, " has ", names.size(), " entries, expected ", count, " or none"));
  }
}

void append(std::vector<float>& floats, const Tensor& tensor) {
  const std::size_t begin = floats.size();
  floats.resize(begin + static_cast<std::size_t>(tensor.elements()));
  copy(tensor.view(), TensorView(floats.data() + begin, tensor.sizes()));
}

void append(std::vector<std::int32_t>& integers, const Tensor& tensor) {
  const std::size_t begin = integers.size();
  integers.resize(begin + static_cast<std::size_t>(tensor.elements()));
  copy(tensor.view(), TensorView(integers.data() + begin, tensor.sizes()));
}

// A profile [heads, size] in bins of `width` places: the mean of each.
void append_binned(std::vector<float>& bins, const Tensor& tensor, std::int64_t width) {
  const std::int64_t heads = tensor.size(0) * tensor.size(1), size = tensor.size(2);
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t begin = 0; begin < size; begin += width) {
      const std::int64_t end = std::min(begin + width, size);
      double sum = 0;
      for (std::int64_t at = begin; at < end; ++at) {
        sum += load_float(tensor, head * size + at);
      }
      bins.push_back(static_cast<float>(sum / static_cast<double>(end - begin)));
    }
  }
}

// The analysis request with which all heads fit.
struct Room {
  bool matrix;                            // whole; the page finds the profiles in it
  std::int64_t row_bin = 1, key_bin = 1;  // places of a profile that share a bin
  AnalysisRequest request;
};

std::int64_t text_bytes(const ViewRequest& request) {
  std::int64_t bytes = 0;
  for (const auto* tokens : {&request.key_tokens, &request.query_tokens}) {
    for (const std::string& token : *tokens) {
      bytes += static_cast<std::int64_t>(token.size()) + 3;
    }
  }
  return std::min(bytes, most_token_bytes);  // longer texts make a larger page
}

Room room_for(std::int64_t heads, std::int64_t queries, std::int64_t keys, std::int64_t token_bytes) {
  std::int64_t bytes = number_bytes - (heads * head_text_bytes + token_bytes) * 3 / 4;
  const double weights = static_cast<double>(heads) * static_cast<double>(queries) * static_cast<double>(keys);
  Room room{.matrix = weights * 4 <= static_cast<double>(bytes), .request = {}};
  AnalysisRequest& request = room.request;
  if (room.matrix) {
    request.top = request.cells = 0;
    return room;
  }
  const std::int64_t bins = std::clamp<std::int64_t>(bytes / 8 / (2 * bin_bytes * heads), 1, most_bins);
  room.row_bin = ceil_div(queries, bins);
  room.key_bin = ceil_div(keys, bins);
  bytes -= (ceil_div(queries, room.row_bin) + ceil_div(keys, room.key_bin)) * heads * bin_bytes;
  while (request.top > 0 && heads * queries * request.top * top_entry_bytes > bytes * 2 / 5) {
    request.top /= 2;
  }
  bytes -= heads * queries * request.top * top_entry_bytes;
  const double cells = std::sqrt(static_cast<double>(bytes) / static_cast<double>(cell_bytes * heads));
  request.cells = std::clamp<std::int64_t>(static_cast<std::int64_t>(cells), 1, most_cells);
  const std::int64_t longest = std::max(queries, keys);
  if (longest <= most_cells && weights * 2 <= static_cast<double>(bytes)) {
    request.cells = longest;  // single weights in three digits, for which mean and largest are one
  }
  return room;
}

// What was asked for, and no more: not the scale that is there by default, nor an alignment that changes nothing.
std::string options_text(const Problem& problem) {
  Plan plan;
  describe_problem(problem, plan);
  std::string options;
  for (std::size_t begin = 0; begin < plan.options.size();) {
    const std::size_t end = std::min(plan.options.find(", ", begin), plan.options.size());
    std::string option = plan.options.substr(begin, end - begin);
    begin = end + 2;
    const double natural = natural_scale(problem.head_dim);  // models write it as D ** -0.5, some in f32
    if (option.starts_with("scale ") && std::abs(problem.scale - natural) <= 1e-6 * natural) {
      continue;
    }
    if (option.starts_with("causal ") && problem.query_len == problem.key_len && !problem.valid_lens &&
        !problem.query_lens) {
      option = "causal";
    }
    options += (options.empty() ? "" : ", ") + option;
  }
  return options;
}

std::string options_text(std::span<const Problem> problems) {
  const std::string first = options_text(problems[0]);
  const bool alike = std::all_of(problems.begin(), problems.end(),
                                 [&](const Problem& problem) { return options_text(problem) == first; });
  return alike ? first : "options differ from layer to layer";
}

// "layer 3, item 0, head 7", without the parts of which there is only one.
std::string name_of(std::span<const Problem> problems, std::size_t layer, std::int64_t b, std::int64_t h) {
  std::string name = problems.size() == 1 ? "" : text("layer ", layer, ", ");
  if (problems[layer].batch != 1) {
    name += text("item ", b, ", ");
  }
  return name + text("head ", h);
}

void append_heads(Content& content, std::span<const Problem> problems, std::size_t layer, const Analysis& found,
                  const std::vector<std::string>& names) {
  for (std::int64_t b = 0; b < problems[layer].batch; ++b) {
    for (std::int64_t h = 0; h < problems[layer].heads; ++h) {
      content.heads.push_back({names.empty() ? name_of(problems, layer, b, h) : names[content.heads.size()],
                               static_cast<std::int64_t>(layer), mean_over_rows(found.entropy, b, h),
                               mean_over_rows(found.distance, b, h), mean_over_rows(found.first, b, h),
                               mean_over_rows(found.diagonal, b, h), mean_over_rows(found.near, b, h)});
    }
  }
}

void take_map_from(const FineMap& fine, Content& content, std::int64_t cells) {
  for (std::size_t head = 0; head < content.heads.size(); ++head) {
    const Tile tile = fine.part(static_cast<std::int64_t>(head), {0, content.queries, 0, content.keys}, cells);
    content.row_cell = tile.row_cell;
    content.key_cell = tile.key_cell;
    content.map_rows = tile.rows;
    content.map_keys = tile.columns;
    content.map_mean.insert(content.map_mean.end(), tile.mean.begin(), tile.mean.end());
    content.map_max.insert(content.map_max.end(), tile.max.begin(), tile.max.end());
  }
}

}  // namespace

std::int64_t heads_in(std::span<const Problem> problems) {
  std::int64_t heads = 0;
  for (const Problem& problem : problems) {
    heads += problem.batch * problem.heads;
  }
  return heads;
}

std::vector<Problem> problems_of(const char* operation, std::span<const ViewLayer> layers, const ViewRequest& request) {
  std::vector<Problem> problems;
  for (const ViewLayer& layer : layers) {
    problems.push_back(analysis_problem(operation, layer.query, layer.key, layer.options));
    const Problem &first = problems.front(), &last = problems.back();
    if (last.query_len != first.query_len || last.key_len != first.key_len) {
      throw InvalidArgument(text(operation, ": layer ", problems.size() - 1, " has ", last.query_len, " queries and ",
                                 last.key_len, " keys, expected ", first.query_len, " and ", first.key_len,
                                 " as layer 0 has"));
    }
  }
  const std::int64_t heads = heads_in(problems);
  const std::int64_t queries = problems.empty() ? 0 : problems.front().query_len;
  const std::int64_t keys = problems.empty() ? 0 : problems.front().key_len;
  if (heads == 0 || queries == 0 || keys == 0) {
    throw InvalidArgument(text(operation, ": there is nothing to show in ", heads, " heads of ", queries,
                               " queries and ", keys, " keys"));
  }
  if (heads > most_heads) {
    throw InvalidArgument(text(operation, ": there are ", heads, " heads, expected at most ", most_heads,
                               " in one page: show some of the layers or items"));
  }
  check_names(operation, "key_tokens", request.key_tokens, keys);
  check_names(operation, "query_tokens", request.query_tokens, queries);
  check_names(operation, "head_names", request.head_names, heads);
  return problems;
}

Analyzed analyzed(std::span<const ViewLayer> layers, std::span<const Problem> problems, const ViewRequest& request,
                  FineMap& fine) {
  const std::int64_t heads = heads_in(problems), queries = problems[0].query_len, keys = problems[0].key_len;
  const Room room = room_for(heads, queries, keys, text_bytes(request));
  Analyzed result{.content = {.title = request.title,
                              .options = request.name_options ? options_text(problems) : "",
                              .queries = queries,
                              .keys = keys,
                              .offset = problems[0].causal == Causal::top_left ? 0 : keys - queries,
                              .key_tokens = request.key_tokens,
                              .layers = static_cast<std::int64_t>(layers.size()),
                              .row_bin = room.row_bin,
                              .key_bin = room.key_bin,
                              .top = room.request.top},
                  .lse = {}};
  Content& content = result.content;
  content.query_tokens = request.query_tokens.empty() && queries == keys ? request.key_tokens : request.query_tokens;
  for (std::size_t n = 0; n < layers.size(); ++n) {
    const auto share = [&](std::size_t layer) {
      return static_cast<double>(layer) / static_cast<double>(layers.size());
    };
    Problem problem = problems[n];
    problem.progress = part_of(request.progress, share(n), share(n + 1));
    const CellTaker taker = fine.empty() ? CellTaker{} : fine.taker(static_cast<std::int64_t>(content.heads.size()));
    Analysis found = analyze(problem, room.request, taker);
    append_heads(content, problems, n, found, request.head_names);
    if (!room.matrix) {
      append_binned(content.entropy, found.entropy, room.row_bin);
      append_binned(content.received, found.received, room.key_bin);
    }
    append(content.top_keys, found.top_keys);
    append(content.top_weights, found.top_weights);
    content.row_cell = found.row_cell;
    content.key_cell = found.key_cell;
    content.map_rows = found.map_mean.size(2);
    content.map_keys = found.map_mean.size(3);
    append(content.map_mean, found.map_mean);
    append(content.map_max, found.map_max);
    if (room.matrix) {
      const ViewLayer& layer = layers[n];
      append(content.weights, weights_in(layer.query, layer.key, {0, queries, 0, keys}, layer.options, found.lse));
    }
    result.lse.push_back(std::move(found.lse));
  }
  if (room.matrix) {
    content.row_cell = content.key_cell = 1;
    content.map_rows = queries;
    content.map_keys = keys;
  } else if (!fine.empty()) {
    take_map_from(fine, content, room.request.cells);
  }
  if (content.row_cell == 1 && content.key_cell == 1) {
    content.map_max.clear();
  }
  return result;
}

}  // namespace headway::view
