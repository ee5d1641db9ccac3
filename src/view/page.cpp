#include "view/page.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <new>

#include "headway/error.h"
#include "io/json_text.h"
#include "view/fine_map.h"
#include "view/html.h"
#include "viewer_texts.h"

namespace headway::view {
namespace {

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
void add(io::JsonObject& blobs, const char* name, const std::vector<T>& numbers) {
  if (!numbers.empty()) {
    blobs.set(name, packed(numbers.data(), numbers.size() * sizeof(T)));
  }
}

// With three digits.
void add_short(io::JsonObject& blobs, const char* name, const std::vector<float>& numbers) {
  std::vector<std::uint16_t> halves(numbers.size());
  std::transform(numbers.begin(), numbers.end(), halves.begin(), short_float);
  add(blobs, name, halves);
}

double finite(double number) { return std::isfinite(number) ? number : 0.0; }

std::string head_text(const Head& head) {
  io::JsonObject object;
  object.set("name", head.name).set("layer", head.layer);
  object.set("entropy", finite(head.entropy)).set("distance", finite(head.distance)).set("first", finite(head.first));
  object.set("diagonal", finite(head.diagonal)).set("near", finite(head.near));
  return object.text();
}

std::string tokens_text(const std::vector<std::string>& tokens) {
  return tokens.empty() ? "null" : io::json_array(tokens);
}

std::string blobs_text(const Content& content) {
  io::JsonObject blobs;
  add_short(blobs, "mapMean", content.map_mean);
  add_short(blobs, "mapMax", content.map_max);
  add_short(blobs, "entropy", content.entropy);
  add_short(blobs, "received", content.received);
  add(blobs, "topKeys", content.top_keys);
  add(blobs, "topWeights", content.top_weights);
  add(blobs, "weights", content.weights);
  return blobs.text();
}

std::string data_text(const Content& content, Source source) {
  const bool same_tokens = !content.query_tokens.empty() && content.query_tokens == content.key_tokens;
  io::JsonObject data;
  data.set("title", content.title).set("options", content.options);
  data.set("queries", content.queries).set("keys", content.keys).set("offset", content.offset);
  data.set("rowBin", content.row_bin).set("keyBin", content.key_bin);
  data.set("rowCell", content.row_cell).set("keyCell", content.key_cell);
  data.set("mapRows", content.map_rows).set("mapKeys", content.map_keys).set("top", content.top);
  data.add("keyTokens", tokens_text(content.key_tokens));
  // "same": the page uses the keys' tokens.
  data.add("queryTokens", same_tokens ? io::json_text("same") : tokens_text(content.query_tokens));
  data.set("layers", content.layers).set("live", source == Source::server);
  data.add("heads", io::json_array(content.heads, head_text)).add("blobs", blobs_text(content));
  return data.text();
}

}  // namespace

std::string page_text(const Content& content, Source source) {
  return assembled({viewer_page_markup, viewer_style, viewer_script}, data_text(content, source),
                   source == Source::server ? Connect::own_server : Connect::nowhere);
}

}  // namespace headway::view
