#include "trace/builder.h"

#include <algorithm>
#include <cstring>

#include "core/text.h"

namespace headway::tracing {

std::pair<Dims, std::vector<std::string>> Builder::shown(const Axes& axes, const Extent& extent) const {
  Dims sizes;
  std::vector<std::string> names;
  const auto show = [&](bool present, const char* axis, std::int64_t size) {
    if (present) {
      sizes.push_back(size);
      names.emplace_back(axis);
    }
  };
  show(axes.batch && has_batch_, "batch", extent.batch);
  show(axes.head && has_head_, "head", extent.heads);
  show(axes.row != nullptr, axes.row, extent.rows);
  show(axes.column != nullptr, axes.column, extent.columns);
  return {sizes, names};
}

void Builder::check(const std::string& name, const Axes& axes, const Extent& extent) const {
  // An empty axis must not hide a long one, which some loop would have to walk along.
  double count = 1;
  for (const std::int64_t size : {extent.batch, extent.heads, extent.rows, extent.columns}) {
    count *= static_cast<double>(std::max<std::int64_t>(size, 1));
  }
  if (count > static_cast<double>(trace_limit)) {
    throw InvalidArgument(text("trace: ", name, " would have shape ", shown(axes, extent).first,
                               ", a step shows at most ", trace_limit,
                               " numbers: take fewer queries, keys, heads or batch items"));
  }
}

std::size_t Builder::add(const Words& words, Grid numbers, std::vector<TraceSource> sources) {
  auto [sizes, axes] = shown(words.axes, numbers.extent);
  TraceStep step{words.name,      words.symbol, words.formula,     words.why, words.kind,
                 std::move(axes), {},           std::move(sources)};
  step.numbers = Tensor::uninitialized(sizes, DType::f64);
  if (!numbers.numbers.empty()) {
    std::memcpy(step.numbers.data(), numbers.numbers.data(), numbers.numbers.size() * sizeof(double));
  }
  steps_.push_back(std::move(step));
  grids_.push_back(std::move(numbers));
  return steps_.size() - 1;
}

std::vector<TraceStep> Builder::finish() { return std::move(steps_); }

}  // namespace headway::tracing
