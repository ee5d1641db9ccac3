// From Python arguments to AttentionOptions: the one place that does it.
#pragma once

#include <cstdint>
#include <optional>

#include "arguments.h"

namespace headway::python {

// The order of an array's four axes; arrays with fewer have no heads, and one order only.
enum class Layout : std::uint8_t { bhsd, bshd };
// What was found, for error texts: the value as Python writes it, shortened where it is long.
std::string found(const Argument& argument);

// Lists and numbers become NumPy arrays; Python's own numbers have no width that could be wrong.
nb::object as_array(const Argument& argument);

Layout read_layout(const Arguments& arguments);

// The same memory as (B, H, S, D).
template <class View>
View heads_second(const View& view, Layout layout) {
  return layout == Layout::bshd && view.rank() == 4 ? view.transpose(1, 2) : view;
}

class Options {
 public:
  explicit Options(const Arguments& arguments);

  AttentionOptions values;

  const std::optional<Array>& bias() const { return bias_; }
  const std::optional<Array>& sinks() const { return sinks_; }

 private:
  std::optional<Array> mask_, bias_, valid_lens_, query_lens_, spans_, alibi_slopes_, sinks_;
};

// An array of integers of any width, as headway takes them: views i32 and i64 as they are, and converts the others.
ConstTensorView read_integers(const Argument& argument, std::optional<Array>& array);

// A pair (left, right) of integers, None on a side for unlimited; read_pair takes no None.
Window read_window(const Argument& argument);
Window read_pair(const Argument& argument);

// A number of things; `fallback` where none is given.
std::int64_t read_count(const Argument& argument, std::int64_t fallback);

Stage read_stage(const Argument& argument);

}  // namespace headway::python
