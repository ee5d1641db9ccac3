// Common to the calls over pages: attention_paged, and attend of a cache.
#pragma once

#include <optional>

#include "options.h"
#include "output.h"
#include "released.h"

namespace headway::python {

// The options that such calls do not have.
inline const std::vector<Option>& absent_in_pages() {
  static const std::vector<Option> absent = {Option::mask, Option::bias, Option::valid_lens, Option::dropout,
                                             Option::seed};
  return absent;
}

// The caller's own keywords of such calls.
struct PagedKeywords {
  Argument bounds;  // cu_seqlens_q
  Argument return_weights, return_lse, out;
};

// Queries (B, H, Sq, D) or packed (total, H, D), results of the same library, and options whose causal is by default
// bottom_right.
class PagedCall {
 public:
  PagedCall(const Arguments& arguments, const Argument& query, const PagedKeywords& keywords);

  // Runs action(query, bounds, out, outputs) without the GIL; out has rows of `width` numbers.
  template <class Action>
  nb::object run(const Arguments& arguments, std::int64_t width, const Action& action) {
    prepare(arguments, width);
    {
      const Released released(options.values);
      action(query_view(), starts_, heads_second(out_->view(), layout_), outputs_);
    }
    return finish();
  }

  Options options;

 private:
  ConstTensorView query_view() const { return heads_second(query_.view(), layout_); }
  void prepare(const Arguments& arguments, std::int64_t width);
  nb::object finish();

  Layout layout_;
  Array query_;
  PagedKeywords keywords_;
  std::optional<Array> bounds_;
  std::optional<ConstTensorView> starts_;
  std::optional<Output> out_, lse_;
  AttentionOutputs outputs_;
};

}  // namespace headway::python
