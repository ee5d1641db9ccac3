// attention_paged.
#include "paged.h"

#include "docstrings.h"
#include "functions.h"
#include "method.h"
#include "shapes.h"

namespace headway::python {
namespace {

nb::object call_paged(const Arguments& arguments) {
  const Array key_pages(arguments.leading(1)), value_pages(arguments.leading(2));
  std::optional<Array> table, lengths, key_scales, value_scales;
  PagedKeys keys{.key_pages = key_pages.page_view(),
                 .value_pages = value_pages.page_view(),
                 .block_table = read_integers(arguments.leading(3), table),
                 .lengths = read_integers(arguments.leading(4), lengths)};
  const auto read_scales = [](const Argument& argument, std::optional<Array>& array,
                              std::optional<ConstTensorView>& view) {
    if (!is_absent(argument)) {
      array.emplace(argument);
      view = array->view("f32");
    }
  };
  read_scales(arguments.own(1), key_scales, keys.key_scales);
  read_scales(arguments.own(2), value_scales, keys.value_scales);
  PagedCall call(arguments, arguments.leading(0),
                 {arguments.own(0), arguments.own(3), arguments.own(4), arguments.own(5)});
  const std::int64_t width = keys.value_pages.rank() == 0 ? 0 : keys.value_pages.size(-1);
  return call.run(arguments, width,
                  [&](ConstTensorView query, std::optional<ConstTensorView> bounds, TensorView out,
                      const AttentionOutputs& outputs) {
                    if (bounds) {
                      attention_paged(query, *bounds, keys, out, call.options.values, outputs);
                    } else {
                      attention_paged(query, keys, out, call.options.values, outputs);
                    }
                  });
}

}  // namespace

PagedCall::PagedCall(const Arguments& arguments, const Argument& query, const PagedKeywords& keywords)
    : options(arguments), layout_(read_layout(arguments)), query_(query), keywords_(keywords) {
  if (!arguments.option(Option::causal).object.is_valid()) {
    options.values.causal = Causal::bottom_right;
  }
  if (is_true(keywords.return_weights)) {
    refuse<InvalidArgument>(keywords.return_weights,
                            "is True, expected False: keys of several lengths have no weights ", "of one shape");
  }
  if (!is_absent(keywords.bounds)) {
    if (layout_ != Layout::bhsd) {
      refuse<InvalidArgument>(arguments.option(Option::layout),
                              "is 'bshd', expected none: packed sequences are (total, H, D)");
    }
    starts_ = read_integers(keywords.bounds, bounds_);
  }
}

void PagedCall::prepare(const Arguments& arguments, std::int64_t width) {
  const ConstTensorView query = query_.view();
  if (is_absent(keywords_.out)) {
    out_.emplace(arguments.made("out"), query_, query.dtype(), with_last(query.sizes(), width));
  } else {
    out_.emplace(keywords_.out);
  }
  if (is_true(keywords_.return_lse)) {
    lse_.emplace(arguments.made("lse"), query_, statistics_type(query.dtype()),
                 lse_sizes(query_view().sizes(), starts_.has_value()));
    outputs_.lse = lse_->view();
  }
}

nb::object PagedCall::finish() {
  nb::object out = out_->finish();
  return lse_ ? nb::object(nb::make_tuple(out, lse_->finish())) : out;
}

void add_paged(nb::module_& module) {
  add_method<call_paged>(
      module,
      Signature("attention_paged", {{"query"}, {"key_pages"}, {"value_pages"}, {"block_table"}, {"lengths"}},
                {{"cu_seqlens_q"},
                 {"key_scales"},
                 {"value_scales"},
                 {"return_weights", "False"},
                 {"return_lse", "False"},
                 {"out"}},
                absent_in_pages())
          .with_causal("'bottom_right'"),
      docs::attention_paged);
}

}  // namespace headway::python
