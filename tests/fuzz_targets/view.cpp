// Pages of small and of absurd tensors, with any options and texts: what the server of a page answers, or one of the
// library's errors.
#include "headway/view.h"

#include <algorithm>

#include "call.h"
#include "headway/threads.h"

using namespace headway;

namespace {

constexpr double most_work = 1 << 14;  // more is allowed, but takes its time
constexpr double absurd = 0x1p62;      // more must be refused at once

std::string page_of(const LiveView& view) {
  const std::string host = "h", address = view.address(host);
  const ViewAnswer answer = view.answer(address.substr(std::string("http://h").size()), host, host);
  fuzz::require(answer.status == 200, "no page");
  return answer.body;
}

// Texts are data: they add no markup to the page.
void check_page(const LiveView& view, const LiveView& without_texts) {
  const auto tags = [](const std::string& page) { return std::count(page.begin(), page.end(), '<'); };
  fuzz::require(tags(page_of(view)) == tags(page_of(without_texts)), "a text has become markup");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  set_threads(1);
  fuzz::Input input(data, size);
  try {
    std::vector<ViewLayer> layers;
    const fuzz::Call first(input);
    const double work = fuzz::work_of(first);
    if (work > most_work && work < absurd) {
      return 0;
    }
    layers.push_back({first.query, first.key, first.options});
    if (input.below(4) == 0) {
      layers.push_back({first.query, input.coin() ? first.key : first.query, {}});
    }
    ViewRequest request{.title = input.text()};
    const auto rows = [](const ConstTensorView& view) { return view.rank() < 2 ? 0 : view.size(view.rank() - 2); };
    request.key_tokens = fuzz::draw_texts(input, rows(first.key));
    request.query_tokens = fuzz::draw_texts(input, rows(first.query));
    request.head_names = fuzz::draw_texts(input, static_cast<std::int64_t>(input.below(6)));
    const LiveView view(layers, request);
    check_page(view, LiveView(layers));
  } catch (const Error& error) {
    fuzz::require_printable(error.what());
  }
  return 0;
}
