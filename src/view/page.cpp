#include "view/page.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <nlohmann/json.hpp>

#include "headway/error.h"
#include "view/fine_map.h"
#include "view/html.h"
#include "viewer_texts.h"

namespace headway::view {
namespace {

using nlohmann::json;

std::string base64(const std::vector<unsigned char>& bytes) {
  static constexpr char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    const auto byte = [&](std::size_t n) { return at + n < bytes.size() ? std::uint32_t{bytes[at + n]} : 0u; };
    const std::uint32_t three = byte(0) << 16 | byte(1) << 8 | byte(2);
    for (int n = 0; n < 4; ++n) {
      const bool past = at + static_cast<std::size_t>(n) > bytes.size();
      text += past ? '=' : letters[three >> (18 - 6 * n) & 63];
    }
  }
  return text;
}

std::string packed(const void* data, std::size_t size) {
  uLongf length = compressBound(static_cast<uLong>(size));
  std::vector<unsigned char> bytes(length);
  if (compress2(bytes.data(), &length, static_cast<const Bytef*>(data), static_cast<uLong>(size), 9) != Z_OK) {
    throw std::bad_alloc();
  }
  bytes.resize(length);
  return base64(bytes);
}

template <class T>
void add(json& blobs, const char* name, const std::vector<T>& numbers) {
  if (!numbers.empty()) {
    blobs[name] = packed(numbers.data(), numbers.size() * sizeof(T));
  }
}

// In three digits.
void add_short(json& blobs, const char* name, const std::vector<float>& numbers) {
  std::vector<std::uint16_t> halves(numbers.size());
  std::transform(numbers.begin(), numbers.end(), halves.begin(), short_float);
  add(blobs, name, halves);
}

double finite(double number) { return std::isfinite(number) ? number : 0.0; }

json data_of(const Content& content, Source source) {
  json data = {{"title", content.title},
               {"options", content.options},
               {"queries", content.queries},
               {"keys", content.keys},
               {"rowCell", content.row_cell},
               {"keyCell", content.key_cell},
               {"mapRows", content.map_rows},
               {"mapKeys", content.map_keys},
               {"top", content.top},
               {"keyTokens", nullptr},
               {"queryTokens", nullptr},
               {"layers", content.layers},
               {"live", source == Source::server},
               {"blobs", json::object()}};
  if (!content.key_tokens.empty()) {
    data["keyTokens"] = content.key_tokens;
  }
  if (!content.query_tokens.empty()) {
    // "same": the page takes the keys' tokens.
    data["queryTokens"] = content.query_tokens == content.key_tokens ? json("same") : json(content.query_tokens);
  }
  data["heads"] = json::array();
  for (const Head& head : content.heads) {
    data["heads"].push_back({{"name", head.name},
                             {"layer", head.layer},
                             {"entropy", finite(head.entropy)},
                             {"distance", finite(head.distance)},
                             {"first", finite(head.first)},
                             {"diagonal", finite(head.diagonal)},
                             {"near", finite(head.near)}});
  }
  json& blobs = data["blobs"];
  add_short(blobs, "mapMean", content.map_mean);
  add_short(blobs, "mapMax", content.map_max);
  add_short(blobs, "entropy", content.entropy);
  add_short(blobs, "received", content.received);
  add(blobs, "topKeys", content.top_keys);
  add(blobs, "topWeights", content.top_weights);
  add(blobs, "weights", content.weights);
  return data;
}

}  // namespace

std::string page_text(const Content& content, Source source) {
  // Bytes that are no UTF-8 are replaced.
  return assembled({viewer_page_markup, viewer_style, viewer_script},
                   data_of(content, source).dump(-1, ' ', false, json::error_handler_t::replace),
                   source == Source::server ? Connect::own_server : Connect::nowhere);
}

}  // namespace headway::view
