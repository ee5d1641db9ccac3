// The kinds of masks that depend on positions and lengths only: each is one function that computes the spans of a row.
#include "core/elements.h"
#include "core/out_of_memory.h"
#include "core/text.h"
#include "headway/error.h"
#include "masks/node.h"

namespace headway::masks {
namespace {

// Wider than any sequence, and small enough to add positions to.
constexpr std::int64_t unlimited = std::int64_t{1} << 61;

std::int64_t side(const char* name, std::optional<std::int64_t> width) {
  if (width && *width < 0) {
    throw InvalidArgument(text("masks.window: ", name, " is ", *width, ", expected 0 or more, or None for unlimited"));
  }
  return std::min(width.value_or(unlimited), unlimited);
}

std::string side_text(std::optional<std::int64_t> width) { return width ? text(*width) : "None"; }

// n keys for all, or a number of keys for each batch item.
struct Counts {
  Counts(const char* function, const Integers& n) : numbers(n.numbers()) {
    const std::string name = text("masks.", function, ": n");
    if (n.sizes().size() > 1) {
      throw InvalidArgument(text(name, " has shape ", n.sizes(), ", expected a number, or one for each batch item"));
    }
    for (std::size_t b = 0; b < numbers.size(); ++b) {
      if (numbers[b] < 0) {
        throw InvalidArgument(
            text(name, n.sizes().empty() ? "" : text("[", b, "]"), " is ", numbers[b], ", expected 0 or more"));
      }
      reach = std::max(reach, numbers[b]);
    }
    traits = {.text = n.sizes().empty() ? text(function, "(", numbers[0], ")")
                                        : text(function, "(", numbers.size(), " lengths)"),
              .batch = static_cast<std::int64_t>(numbers.size()),
              .reach = reach};
  }
  std::int64_t of(const MaskRow& row) const { return numbers[static_cast<std::size_t>(row.batch_item)]; }

  std::vector<std::int64_t> numbers;
  std::int64_t reach = 0;
  MaskTraits traits;
};

}  // namespace

Integers::Integers(ConstTensorView view) try : sizes_(view.sizes()) {
  if (!is_integer(view.dtype())) {
    throw TypeMismatch(text("masks: found an array of type ", view.dtype(), ", expected integers"));
  }
  numbers_.resize(static_cast<std::size_t>(view.elements()));
  const Tensor host = view.device() == Device{} ? Tensor() : copied_to(view, Device{});
  copy(view.device() == Device{} ? view : host.view(), TensorView(numbers_, sizes_));
} catch (...) {
  throw_own_error("masks");
}

Mask causal() {
  return span_mask({.text = "causal()"}, [](const MaskRow& row, SpanLists& spans) { spans.add(0, row.place() + 1); });
}

Mask window(std::optional<std::int64_t> left, std::optional<std::int64_t> right) {
  const std::int64_t before = side("left", left), after = side("right", right);
  return span_mask(
      {.text = text("window(", side_text(left), ", ", side_text(right), ")"),
       .reach = std::max(left.value_or(0), right.value_or(0))},
      [=](const MaskRow& row, SpanLists& spans) { spans.add(row.place() - before, row.place() + after + 1); });
}

Mask first(const Integers& n) {
  const Counts counts("first", n);
  MaskTraits traits = counts.traits;
  traits.rows = 0;
  return span_mask(traits, [counts](const MaskRow& row, SpanLists& spans) { spans.add(0, counts.of(row)); });
}

Mask prefix(const Integers& n) {
  const Counts counts("prefix", n);
  return span_mask(counts.traits, [counts](const MaskRow& row, SpanLists& spans) {
    spans.add(0, std::max(counts.of(row), row.place() + 1));
  });
}

}  // namespace headway::masks
