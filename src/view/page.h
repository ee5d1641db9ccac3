// The text of the page, from what it shows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headway::view {

struct Head {
  std::string name;
  std::int64_t layer = 0;
  double entropy = 0, distance = 0, first = 0, diagonal = 0, near = 0;  // means over the rows
};

// Arrays have the heads first, contiguous; an empty one is left out. With `weights` the page needs no maps.
struct Content {
  std::string title, options;
  std::int64_t queries = 0, keys = 0, offset = 0;  // query i stands where key i + offset does
  std::vector<std::string> key_tokens = {}, query_tokens = {};
  std::int64_t layers = 1;
  std::vector<Head> heads = {};
  std::int64_t row_bin = 1, key_bin = 1;  // places that a number of a profile is the mean of
  std::int64_t row_cell = 1, key_cell = 1, map_rows = 0, map_keys = 0;
  std::int64_t top = 0;
  std::vector<float> map_mean = {}, map_max = {};  // in three digits; no maxima where a cell is one weight
  std::vector<float> entropy = {}, received = {};  // profiles, in three digits; none beside `weights`
  std::vector<std::int32_t> top_keys = {};
  std::vector<float> top_weights = {}, weights = {};  // as they are
};

// Whether the page is in a file, or comes from a server from which it can request more.
enum class Source : std::uint8_t { file, server };

std::string page_text(const Content& content, Source source);

}  // namespace headway::view
