// The answers of a server of the page. The protocol, besides the page's own path:
//   tile?head=..&r0=..&r1=..&k0=..&k1=..  the weights of rows [r0, r1) and keys [k0, k1) of a head, in at most 513
//       cells along each side: six i32, which are row_begin, key_begin, row_cell, key_cell, rows and columns of the
//       cells, then rows * columns f32 means, then as many maxima
//   row?head=..&i=..                      the strongest keys of a row: n i32 keys, then n f32 weights
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>

#include "core/ceil_div.h"
#include "core/elements.h"
#include "core/out_of_memory.h"
#include "core/plan.h"
#include "core/text.h"
#include "headway/analysis.h"
#include "view/content.h"

namespace headway {
namespace {

constexpr std::int64_t cells_along_a_side = 512;
constexpr std::int64_t strongest = 8;                         // keys of a row
constexpr std::int64_t fine_map_bytes = 512'000'000;          // of all heads together
constexpr double most_pairs = 0x1p28, fewest_pairs = 0x1p24;  // of a part that is computed on request
constexpr double seconds_to_wait = 0.05;  // at the speed of the analysis; a part takes about 1.5 times as long

std::string random_word() {
  static constexpr char letters[] = "abcdefghijklmnopqrstuvwxyz234567";
  std::random_device random;
  std::string word;
  for (int n = 0; n < 26; ++n) {  // 130 bits
    word += letters[random() & 31];
  }
  return word;
}

// The integer value of `name` in a query like a=1&b=2; no other form is accepted.
std::optional<std::int64_t> number_in(std::string_view query, std::string_view name) {
  while (!query.empty()) {
    const std::string_view entry = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), entry.size() + 1));
    if (entry.size() > name.size() && entry.starts_with(name) && entry[name.size()] == '=') {
      const std::string_view digits = entry.substr(name.size() + 1);
      std::int64_t number = 0;
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
      const bool whole = error == std::errc{} && end == digits.data() + digits.size();
      return whole ? std::optional(number) : std::nullopt;
    }
  }
  return std::nullopt;
}

template <class T>
void append(std::string& body, const std::vector<T>& numbers) {
  body.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T));
}

// Whether a request's host is this machine, with any port, since a tunnel changes the port. A foreign page whose host
// name resolves to this machine is rejected.
bool names_this_machine(std::string_view host, std::string_view own_host) {
  if (host == own_host) {
    return true;
  }
  const std::size_t colon = host.ends_with(']') ? host.npos : host.rfind(':');  // [::1] is a name without a port
  const std::string_view name = host.substr(0, colon);
  return name == "localhost" || name == "127.0.0.1" || name == "[::1]";
}

ViewAnswer refusal(int status, const char* reason) {
  return {.status = status,
          .headers = {{"Content-Type", "text/plain; charset=utf-8"}},
          .body = text("headway: ", reason, "\n")};
}

std::vector<float> floats_of(const Tensor& tensor) {
  std::vector<float> floats(static_cast<std::size_t>(tensor.elements()));
  copy(tensor.view(), TensorView(floats.data(), tensor.sizes()));
  return floats;
}

std::vector<ViewLayer> without_progress(std::span<const ViewLayer> layers) {
  std::vector<ViewLayer> result(layers.begin(), layers.end());
  for (ViewLayer& layer : result) {
    layer.options.progress = {};
  }
  return result;
}

// Empty for matrices small enough that every part can be computed on request.
view::FineMap fine_map_for(std::span<const Problem> problems) {
  const std::int64_t queries = problems[0].query_len, keys = problems[0].key_len;
  if (static_cast<double>(queries) * static_cast<double>(keys) <= fewest_pairs) {
    return {};
  }
  return {view::heads_in(problems), queries, keys, fine_map_bytes};
}

}  // namespace

struct LiveView::State {
  State(std::span<const ViewLayer> given, const ViewRequest& request)
      : layers(without_progress(given)), problems(view::problems_of("LiveView", layers, request)) {
    fine = fine_map_for(problems);
    const auto begin = std::chrono::steady_clock::now();
    view::Analyzed found = view::analyzed(layers, problems, request, fine);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    double pairs = 0;
    for (const Problem& problem : problems) {
      pairs += common_plan(problem).pairs;
    }
    affordable_pairs = std::clamp(pairs / took.count() * seconds_to_wait, fewest_pairs, most_pairs);
    page = view::page_text(found.content, view::Source::server);
    lse = std::move(found.lse);
  }

  // A head of the page as a head of one of the layers.
  struct Place {
    std::size_t layer;
    std::int64_t batch, head;
  };

  std::optional<Place> place_of(std::int64_t head) const {
    for (std::size_t layer = 0; head >= 0 && layer < problems.size(); ++layer) {
      const std::int64_t heads = problems[layer].heads, all = problems[layer].batch * heads;
      if (head < all) {
        return Place{layer, head / heads, head % heads};
      }
      head -= all;
    }
    return std::nullopt;
  }

  TileMap computed(const Place& place, const Rectangle& part, std::int64_t row_cell, std::int64_t key_cell) const {
    const ViewLayer& layer = layers[place.layer];
    return tile_map(layer.query, layer.key, lse[place.layer], place.batch, place.head, part, row_cell, key_cell,
                    layer.options);
  }

  view::Tile tile_of(std::int64_t head, const Place& place, const Rectangle& part) const {
    const std::int64_t rows = part.row_end - part.row_begin, keys = part.key_end - part.key_begin;
    if (!fine.empty() && static_cast<double>(rows) * static_cast<double>(keys) > affordable_pairs) {
      return fine.part(head, part, cells_along_a_side);
    }
    const std::int64_t row_cell = ceil_div(rows, cells_along_a_side), key_cell = ceil_div(keys, cells_along_a_side);
    const TileMap map = computed(place, part, row_cell, key_cell);
    return {part.row_begin,   part.key_begin,      row_cell,          key_cell, map.mean.size(0),
            map.mean.size(1), floats_of(map.mean), floats_of(map.max)};
  }

  ViewAnswer answer_tile(std::string_view query) const {
    const auto head = number_in(query, "head"), r0 = number_in(query, "r0"), r1 = number_in(query, "r1"),
               k0 = number_in(query, "k0"), k1 = number_in(query, "k1");
    const auto place = head ? place_of(*head) : std::nullopt;
    const auto inside = [](const auto& begin, const auto& end, std::int64_t size) {
      return begin && end && *begin >= 0 && *begin < *end && *end <= size;
    };
    if (!place || !inside(r0, r1, problems[0].query_len) || !inside(k0, k1, problems[0].key_len)) {
      return refusal(400, "there is no such part of a head");
    }
    const view::Tile tile = tile_of(*head, *place, {*r0, *r1, *k0, *k1});
    ViewAnswer answer;
    std::vector<std::int32_t> grid;
    for (const std::int64_t number :
         {tile.row_begin, tile.key_begin, tile.row_cell, tile.key_cell, tile.rows, tile.columns}) {
      grid.push_back(static_cast<std::int32_t>(number));
    }
    append(answer.body, grid);
    append(answer.body, tile.mean);
    append(answer.body, tile.max);
    return answer;
  }

  ViewAnswer answer_row(std::string_view query) const {
    const auto head = number_in(query, "head"), i = number_in(query, "i");
    const auto place = head ? place_of(*head) : std::nullopt;
    if (!place || !i || *i < 0 || *i >= problems[0].query_len) {
      return refusal(400, "there is no such row of a head");
    }
    const std::int64_t keys = problems[0].key_len;
    const std::vector<float> weights = floats_of(computed(*place, {*i, *i + 1, 0, keys}, 1, 1).max);
    std::vector<std::int32_t> order(weights.size());
    std::iota(order.begin(), order.end(), 0);
    const auto weight = [&](std::int32_t key) {
      const float found = weights[static_cast<std::size_t>(key)];
      return found > 0 ? found : 0.0f;  // NaN cannot be ordered
    };
    const auto end = order.begin() + std::min(strongest, keys);
    std::partial_sort(order.begin(), end, order.end(), [&](std::int32_t a, std::int32_t b) {
      return weight(a) != weight(b) ? weight(a) > weight(b) : a < b;
    });
    order.erase(std::find_if(order.begin(), end, [&](std::int32_t key) { return weight(key) == 0; }), order.end());
    std::vector<float> found;
    std::transform(order.begin(), order.end(), std::back_inserter(found), weight);
    ViewAnswer answer;
    append(answer.body, order);
    append(answer.body, found);
    return answer;
  }

  ViewAnswer answer(std::string_view target, std::string_view host, std::string_view own_host) const {
    if (!names_this_machine(host, own_host)) {
      return refusal(403, "this page is for this machine alone, under its own name: localhost");
    }
    if (!target.starts_with(path)) {
      return refusal(404, "the address is not complete: it is the one that was printed, to its end");
    }
    const std::string_view rest = target.substr(path.size());
    const std::string_view name = rest.substr(0, rest.find('?'));
    const std::string_view query = rest.substr(std::min(rest.size(), name.size() + 1));
    if (name.empty()) {
      return {.headers = {{"Content-Type", "text/html; charset=utf-8"}}, .body = page};
    }
    return name == "tile"  ? answer_tile(query)
           : name == "row" ? answer_row(query)
                           : refusal(404, "there is nothing of this name");
  }

  std::vector<ViewLayer> layers;
  std::vector<Problem> problems;
  view::FineMap fine;
  std::vector<Tensor> lse;
  double affordable_pairs = 0;
  std::string page, path = text("/", random_word(), "/");
};

LiveView::LiveView(std::span<const ViewLayer> layers, const ViewRequest& request) try
    : state_(std::make_unique<State>(layers, request)) {
} catch (...) {
  throw_own_error("LiveView");
}

LiveView::~LiveView() = default;

std::string LiveView::address(std::string_view own_host) const { return text("http://", own_host, state_->path); }

ViewAnswer LiveView::answer(std::string_view target, std::string_view host, std::string_view own_host) const try {
  ViewAnswer answer = state_->answer(target, host, own_host);
  if (answer.headers.empty()) {
    answer.headers.emplace_back("Content-Type", "application/octet-stream");
  }
  answer.headers.insert(answer.headers.end(), {{"Cache-Control", "no-store"},
                                               {"X-Content-Type-Options", "nosniff"},
                                               {"Cross-Origin-Resource-Policy", "same-origin"},
                                               {"Referrer-Policy", "no-referrer"},
                                               {"X-Frame-Options", "DENY"}});
  return answer;
} catch (...) {
  throw_own_error("LiveView::answer");
}

}  // namespace headway
