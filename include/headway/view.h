// A page that shows attention: every head as a small map, one head from the whole matrix down to single cells, and what
// each row attends to most. One HTML file that needs nothing else, no network either.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "headway/attention.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

struct ViewRequest {
  std::string title = "Attention";
  std::vector<std::string> key_tokens = {};    // one a key; without them positions are shown
  std::vector<std::string> query_tokens = {};  // one a query; the keys' where there are as many
  std::vector<std::string> head_names = {};    // one for each of the B * H heads
  bool overwrite = false;                      // an existing file is an error otherwise
};

// Analyzes query [B,H,Sq,D] and key [B,Hkv,Sk,D], or with fewer axes, and writes the page. A small matrix is in the
// file whole; a large one as exact means and maxima of cells, so that the file stays below 5 MB, with each row's
// strongest keys as long as there is room for them. Tokens are data: whatever they hold is shown, never run.
void write_view(const std::filesystem::path& path, ConstTensorView query, ConstTensorView key,
                const AttentionOptions& options = {}, const ViewRequest& request = {});

// The page's text. From a server, it asks for exact parts as it zooms: GET
// tile?head=..&r0=..&r1=..&k0=..&k1=..&rc=..&kc=.. beside the page answers with the f32 numbers of tile_map(): all
// means, then all maxima; or 204 where that takes too long.
enum class ViewSource : std::uint8_t { file, server };

struct ViewPage {
  std::string text;
  Tensor lse;  // [B,H,Sq], for tile_map
};

ViewPage view_page(ConstTensorView query, ConstTensorView key, const AttentionOptions& options = {},
                   const ViewRequest& request = {}, ViewSource source = ViewSource::file);

}  // namespace headway
#pragma GCC visibility pop
