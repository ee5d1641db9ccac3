// analyze, weights_in and mean_weights: what attention did.
#include "headway/analysis.h"

#include <optional>

#include "arguments.h"
#include "docstrings.h"
#include "functions.h"
#include "method.h"
#include "options.h"
#include "output.h"
#include "progress_bar.h"
#include "released.h"

namespace headway::python {
namespace {

// Results have B and H always; a user's array without them gets results without them.
ConstTensorView without_missing_axes(ConstTensorView view, int rank) {
  if (rank < 4) {
    view = view.select(1, 0);
  }
  return rank < 3 ? view.select(0, 0) : view;
}

class ArrayMaker {
 public:
  ArrayMaker(const char* operation, const Array& like)
      : operation_(operation), like_(like), rank_(like.sizes().size()) {}

  nb::object operator()(const char* name, const Tensor& tensor) const {
    const ConstTensorView view = without_missing_axes(tensor, rank_);
    Output output({operation_, name, {}}, like_, view.dtype(), view.sizes(), Where::host);
    copy(view, output.view());
    return output.finish();
  }

 private:
  const char* operation_;
  const Array& like_;
  int rank_;
};

// The similarity of one head with itself has no use; [B,H,H] loses its batch only.
nb::object similarity_of(const char* operation, const Array& like, const Tensor& similarity) {
  if (like.sizes().size() < 4) {
    return nb::none();
  }
  Output output({operation, "similarity", {}}, like, similarity.dtype(), similarity.sizes(), Where::host);
  copy(similarity, output.view());
  return output.finish();
}

nb::object call_analyze(const Arguments& arguments) {
  const char* operation = arguments.function();
  const Array query(arguments.leading(0)), key(arguments.leading(1));
  const Layout layout = read_layout(arguments);
  const ConstTensorView query_view = heads_second(query.view(), layout), key_view = heads_second(key.view(), layout);
  Options options(arguments);
  AnalysisRequest request;
  request.top = read_count(arguments.own(0), request.top);
  if (!is_absent(arguments.own(1))) {
    request.near = read_window(arguments.own(1));
  }
  request.cells = read_count(arguments.own(2), request.cells);
  std::optional<Analysis> found;
  {
    const ProgressBar bar(operation, arguments.own(3).object);
    const Released released(options.values.progress, bar.callable());
    found = analyze(query_view, key_view, options.values, request);
  }
  const ArrayMaker array(operation, query);
  static const nb::object& result = *new nb::object(nb::module_::import_("headway._results").attr("Analysis"));
  return result(array("lse", found->lse), array("entropy", found->entropy), array("distance", found->distance),
                array("first", found->first), array("diagonal", found->diagonal), array("near", found->near),
                array("received", found->received), array("top_keys", found->top_keys),
                array("top_weights", found->top_weights), array("map_mean", found->map_mean),
                array("map_max", found->map_max), found->row_cell, found->key_cell,
                similarity_of(operation, query, found->similarity));
}

nb::object call_weights_in(const Arguments& arguments) {
  const char* operation = arguments.function();
  const Array query(arguments.leading(0)), key(arguments.leading(1));
  const Layout layout = read_layout(arguments);
  const ConstTensorView query_view = heads_second(query.view(), layout), key_view = heads_second(key.view(), layout);
  Rectangle rectangle;
  const auto read = [](const Argument& argument, std::int64_t& begin, std::int64_t& end) {
    const Window pair = read_pair(argument);
    begin = pair.left.value_or(0);
    end = pair.right.value_or(0);
  };
  read(arguments.leading(2), rectangle.row_begin, rectangle.row_end);
  read(arguments.leading(3), rectangle.key_begin, rectangle.key_end);
  Options options(arguments);
  std::optional<Array> lse;
  std::optional<ConstTensorView> lse_view;
  if (const Argument given = arguments.own(0); !is_absent(given)) {
    lse.emplace(given);
    lse_view = lse->view("f32 or f64");
  }
  std::optional<Tensor> found;
  {
    const Released released(options.values);
    found = weights_in(query_view, key_view, rectangle, options.values, lse_view);
  }
  return ArrayMaker(operation, query)("weights", *found);
}

nb::object call_mean_weights(const Arguments& arguments) {
  const Array query(arguments.leading(0)), key(arguments.leading(1)), lse(arguments.leading(2));
  const Layout layout = read_layout(arguments);
  const ConstTensorView query_view = heads_second(query.view(), layout), key_view = heads_second(key.view(), layout);
  const ConstTensorView lse_view = lse.view("f32 or f64");
  Options options(arguments);
  // What does not fit is refused by the call itself.
  const int rank = query_view.rank();
  const std::int64_t keys = key_view.rank() < 2 ? 0 : key_view.size(key_view.rank() - 2);
  const std::int64_t rows = rank < 2 ? 0 : query_view.size(rank - 2);
  const Dims sizes = rank < 3 ? Dims{rows, keys} : Dims{query_view.size(0), rows, keys};
  Output mean(arguments.made("mean"), query, query_view.dtype(), sizes);
  {
    const Released released(options.values);
    mean_weights(query_view, key_view, lse_view, mean.view(), options.values);
  }
  return mean.finish();
}

}  // namespace

void add_analysis(nb::module_& module) {
  add_method<call_analyze>(
      module, {"analyze", {{"query"}, {"key"}}, {{"top", "8"}, {"near", "(64, 64)"}, {"cells", "256"}, {"progress"}}},
      docs::analyze);
  add_method<call_weights_in>(module, {"weights_in", {{"query"}, {"key"}, {"rows"}, {"keys"}}, {{"lse"}}},
                              docs::weights_in);
  add_method<call_mean_weights>(module, {"mean_weights", {{"query"}, {"key"}, {"lse"}}, {}}, docs::mean_weights);
}

}  // namespace headway::python
