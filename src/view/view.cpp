// From an analysis to the page: what goes in, and how fine, so that the file stays small.
#include "headway/view.h"

#include <algorithm>
#include <cmath>

#include "analysis/slice.h"
#include "core/ceil_div.h"
#include "core/elements.h"
#include "core/plan.h"
#include "core/text.h"
#include "headway/analysis.h"
#include "io/output_file.h"
#include "view/page.h"

namespace headway {
namespace {

// Bytes before packing.
constexpr std::int64_t map_bytes = 2'400'000, matrix_bytes = 2'000'000, top_bytes = 1'500'000;
constexpr std::int64_t most_bins = 1024;  // of a profile

void check_names(const Problem& problem, const char* what, const std::vector<std::string>& names, std::int64_t count) {
  if (!names.empty() && static_cast<std::int64_t>(names.size()) != count) {
    throw InvalidArgument(
        text(problem.operation, ": ", what, " has ", names.size(), " entries, expected ", count, " or none"));
  }
}

std::vector<float> floats_of(const Tensor& tensor) {
  std::vector<float> result(static_cast<std::size_t>(tensor.elements()));
  copy(tensor.view(), TensorView(result.data(), tensor.sizes()));
  return result;
}

// A profile [heads, size] in at most most_bins bins: the mean of each.
std::vector<float> binned(const Tensor& tensor) {
  const std::int64_t heads = tensor.size(0) * tensor.size(1), size = tensor.size(2);
  const std::int64_t width = std::max<std::int64_t>(ceil_div(size, most_bins), 1);
  const std::int64_t bins = ceil_div(size, width);
  std::vector<float> result;
  result.reserve(static_cast<std::size_t>(heads * bins));
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t bin = 0; bin < bins; ++bin) {
      const std::int64_t begin = bin * width, end = std::min(begin + width, size);
      double sum = 0;
      for (std::int64_t at = begin; at < end; ++at) {
        sum += load_float(tensor, head * size + at);
      }
      result.push_back(static_cast<float>(sum / static_cast<double>(end - begin)));
    }
  }
  return result;
}

// As fine as the room for all heads allows.
AnalysisRequest analysis_for(std::int64_t heads, std::int64_t queries) {
  AnalysisRequest request;
  const double room = static_cast<double>(map_bytes) / (4.0 * static_cast<double>(std::max<std::int64_t>(heads, 1)));
  request.cells = std::clamp<std::int64_t>(static_cast<std::int64_t>(std::sqrt(room)), 8, 512);
  while (request.top > 0 && heads * queries * request.top * 8 > top_bytes) {
    request.top /= 2;
  }
  return request;
}

std::vector<view::Head> heads_of(const Analysis& found, const std::vector<std::string>& names) {
  std::vector<view::Head> heads;
  for (std::int64_t b = 0; b < found.lse.size(0); ++b) {
    for (std::int64_t h = 0; h < found.lse.size(1); ++h) {
      const std::string own = found.lse.size(0) == 1 ? text("head ", h) : text("item ", b, ", head ", h);
      heads.push_back({names.empty() ? own : names[heads.size()], mean_over_rows(found.entropy, b, h),
                       mean_over_rows(found.distance, b, h), mean_over_rows(found.first, b, h),
                       mean_over_rows(found.diagonal, b, h), mean_over_rows(found.near, b, h)});
    }
  }
  return heads;
}

Problem view_problem(const char* operation, ConstTensorView query, ConstTensorView key, const AttentionOptions& options,
                     const ViewRequest& request) {
  const Problem problem = analysis_problem(operation, query, key, options);
  const std::int64_t heads = problem.batch * problem.heads, queries = problem.query_len, keys = problem.key_len;
  check_names(problem, "key_tokens", request.key_tokens, keys);
  check_names(problem, "query_tokens", request.query_tokens, queries);
  check_names(problem, "head_names", request.head_names, heads);
  if (heads == 0 || queries == 0 || keys == 0) {
    throw InvalidArgument(text(operation, ": there is nothing to show in ", heads, " heads of ", queries,
                               " queries and ", keys, " keys"));
  }
  return problem;
}

std::string options_text(const Problem& problem) {
  Plan plan;
  describe_problem(problem, plan);
  return plan.options;
}

// Analyzes the call, as fine as a page has room for.
view::Content content_of(const Problem& problem, ConstTensorView query, ConstTensorView key,
                         const AttentionOptions& options, const ViewRequest& request, Tensor& lse) {
  const std::int64_t heads = problem.batch * problem.heads, queries = problem.query_len, keys = problem.key_len;
  const AnalysisRequest wanted = analysis_for(heads, queries);
  Analysis found = analyze(query, key, options, wanted);
  view::Content content{
      .title = request.title,
      .options = options_text(problem),
      .queries = queries,
      .keys = keys,
      .key_tokens = request.key_tokens,
      .query_tokens = request.query_tokens.empty() && queries == keys ? request.key_tokens : request.query_tokens,
      .heads = heads_of(found, request.head_names),
      .row_cell = found.row_cell,
      .key_cell = found.key_cell,
      .map_rows = found.map_mean.size(2),
      .map_keys = found.map_mean.size(3),
      .top = wanted.top,
      .map_mean = floats_of(found.map_mean),
      .map_max = floats_of(found.map_max),
      .entropy = binned(found.entropy),
      .received = binned(found.received)};
  if (problem.batch == 1) {
    content.similarity = floats_of(found.similarity);
  }
  if (wanted.top > 0) {
    content.top_keys.resize(static_cast<std::size_t>(found.top_keys.elements()));
    copy(found.top_keys.view(), TensorView(content.top_keys.data(), found.top_keys.sizes()));
    content.top_weights = floats_of(found.top_weights);
  }
  if (static_cast<double>(heads) * static_cast<double>(queries) * static_cast<double>(keys) * 4 <= matrix_bytes) {
    content.weights = floats_of(weights_in(query, key, {0, queries, 0, keys}, options, found.lse));
  }
  lse = std::move(found.lse);
  return content;
}

}  // namespace

ViewPage view_page(ConstTensorView query, ConstTensorView key, const AttentionOptions& options,
                   const ViewRequest& request, ViewSource source) {
  const Problem problem = view_problem("view_page", query, key, options, request);
  ViewPage page;
  page.text = view::page_text(content_of(problem, query, key, options, request, page.lse), source);
  return page;
}

void write_view(const std::filesystem::path& path, ConstTensorView query, ConstTensorView key,
                const AttentionOptions& options, const ViewRequest& request) {
  const Problem problem = view_problem("write_view", query, key, options, request);
  io::OutputFile file("write_view", path, request.overwrite);  // before the work: a target that cannot be written
  Tensor lse;
  const std::string page = view::page_text(content_of(problem, query, key, options, request, lse), ViewSource::file);
  file.write(std::as_bytes(std::span(page)));
  file.commit();
}

}  // namespace headway
