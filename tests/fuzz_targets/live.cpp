// Requests to the server of a page: a line with the Host header, then the target, in which a leading "~" stands for the
// page's random path. Inputs that begin with "^" are parts of a fine map, from which the server takes what is large.
#include <cmath>
#include <regex>

#include "headway/threads.h"
#include "headway/view.h"
#include "support.h"
#include "view/fine_map.h"

using namespace headway;

namespace {

constexpr std::string_view host = "127.0.0.1:8000";

struct Page {
  Tensor query, key;
  LiveView view;

  Page() : query({1, 2, 5, 1}), key({1, 2, 7, 1}), view(layers()) {}

  std::string path() const { return view.address(host).substr(std::string_view("http://").size() + host.size()); }

 private:
  std::vector<ViewLayer> layers() {
    for (Tensor* tensor : {&query, &key}) {
      for (std::int64_t n = 0; n < tensor->elements(); ++n) {
        tensor->as<float>()[n] = std::sin(static_cast<float>(n));
      }
    }
    return {{query, key, {.causal = Causal::bottom_right}}, {query, key, {}}};
  }
};

template <class T>
T number_at(const std::string& body, std::size_t index) {
  T number;
  std::memcpy(&number, body.data() + index * sizeof number, sizeof number);
  return number;
}

void check_weights(const std::string& body, std::size_t begin) {
  for (std::size_t n = begin; n < body.size() / sizeof(float); ++n) {
    const float weight = number_at<float>(body, n);
    fuzz::require(weight >= 0 && weight <= 1.01f, "a weight outside 0 to 1");
  }
}

void check_tile(const std::string& body) {
  constexpr std::size_t header = 6;
  const auto rows = static_cast<std::size_t>(number_at<std::int32_t>(body, 4));
  const auto columns = static_cast<std::size_t>(number_at<std::int32_t>(body, 5));
  fuzz::require(rows >= 1 && rows <= 513 && columns >= 1 && columns <= 513, "too many cells");
  fuzz::require(body.size() == (header + 2 * rows * columns) * sizeof(float), "another size than it says");
  check_weights(body, header);
}

void check_row(const std::string& body) {
  fuzz::require(body.size() % 8 == 0 && body.size() <= 64, "more than the strongest keys");
  check_weights(body, body.size() / 8);
}

void check_request(std::string_view text) {
  static const Page page;
  const std::string_view given_host = text.substr(0, text.find('\n'));
  std::string target(text.substr(std::min(text.size(), given_host.size() + 1)));
  if (target.starts_with('~')) {
    target.replace(0, 1, page.path());
  }
  const bool own = target.starts_with(page.path());  // libFuzzer reads the path out of comparisons
  const ViewAnswer answer = page.view.answer(target, given_host, host);
  // A port, of whatever characters; but a host that ends with a bracket has none.
  static const std::regex this_machine(R"((localhost|127[.]0[.]0[.]1|\[::1\])(:([^:]*[^:\]])?)?)");
  const bool refused = answer.body.starts_with("headway: ");
  if (!std::regex_match(given_host.begin(), given_host.end(), this_machine)) {
    fuzz::require(answer.status == 403 && refused, "an answer for a stranger");
  } else if (!own) {
    fuzz::require(answer.status == 404 && refused, "an answer without the path");
  } else if (answer.status == 200) {
    const std::string rest = target.substr(page.path().size());
    rest.starts_with("tile") ? check_tile(answer.body) : rest.starts_with("row") ? check_row(answer.body) : void();
  } else {
    fuzz::require((answer.status == 400 || answer.status == 404) && refused, "another status");
  }
}

// [begin, end) of `size`, not empty.
std::pair<std::int64_t, std::int64_t> draw_span(fuzz::Input& input, std::int64_t size) {
  const std::int64_t begin = input.take<std::uint16_t>() % size;
  return {begin, begin + 1 + input.take<std::uint16_t>() % (size - begin)};
}

void check_fine_map(fuzz::Input input) {
  constexpr std::int64_t queries = 1000, keys = 777;
  static const view::FineMap map(2, queries, keys, 40'000);
  const auto rows = draw_span(input, queries), columns = draw_span(input, keys);
  const auto cells = static_cast<std::int64_t>(1 + input.below(64));
  const auto head = static_cast<std::int64_t>(input.below(2));
  const view::Tile tile = map.part(head, {rows.first, rows.second, columns.first, columns.second}, cells);
  fuzz::require(tile.rows <= cells + 1 && tile.columns <= cells + 1, "too many cells");
  fuzz::require(tile.row_begin <= rows.first && tile.row_begin + tile.rows * tile.row_cell >= rows.second, "rows");
  fuzz::require(tile.key_begin <= columns.first && tile.key_begin + tile.columns * tile.key_cell >= columns.second,
                "keys");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  set_threads(1);
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (text.starts_with('^')) {
    check_fine_map(fuzz::Input(data + 1, size - 1));
  } else {
    check_request(text);
  }
  return 0;
}
