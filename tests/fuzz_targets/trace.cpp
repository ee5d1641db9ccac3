// Traces of small and of absurd tensors, with any options, tokens and weights: a text and a page that stay harmless, or
// one of the library's errors.
#include "headway/trace.h"

#include <algorithm>

#include "call.h"

using namespace headway;

namespace {

std::int64_t rows_of(const ConstTensorView& view) { return view.rank() < 2 ? 0 : view.size(view.rank() - 2); }

void draw_weights(fuzz::Input& input, const fuzz::Call& call, TraceRequest& request) {
  constexpr const char* names[] = {"W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o"};
  for (std::size_t n = input.below(5); n > 0; --n) {
    const std::string name = input.below(8) == 0 ? input.text() : names[input.below(std::size(names))];
    request.weights.emplace(name, call.view(input, DType::f32, fuzz::draw_sizes(input, name.starts_with('W') ? 2 : 1)));
  }
}

void check_text(const std::string& text) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    fuzz::require_printable(std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
  }
}

// Texts are data: they add no markup to the page.
void check_page(Trace& trace) {
  const auto tags = [](const std::string& page) { return std::count(page.begin(), page.end(), '<'); };
  const auto with_texts = tags(trace_page(trace));
  trace.title.clear();
  trace.key_tokens.clear();
  trace.query_tokens.clear();
  fuzz::require(tags(trace_page(trace)) == with_texts, "a text has become markup");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  try {
    const fuzz::Call call(input);
    TraceRequest request{.title = input.text()};
    if (input.coin()) {
      request.heads = static_cast<std::int8_t>(input.take<std::uint8_t>());
      request.kv_heads = static_cast<std::int8_t>(input.take<std::uint8_t>());
      draw_weights(input, call, request);
    }
    request.key_tokens = fuzz::draw_texts(input, rows_of(call.key));
    request.query_tokens = fuzz::draw_texts(input, rows_of(call.query));
    Trace made = trace(call.query, call.key, call.value, call.options, request);
    check_text(to_string(made, {.colour = false, .width = input.take<std::int16_t>()}));
    to_string(made, {.colour = true});
    check_page(made);
  } catch (const Error& error) {
    fuzz::require_printable(error.what());
  }
  return 0;
}
