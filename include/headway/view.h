// A page that shows attention: every head as a small map, one head from the whole matrix down to single cells, and what
// each row attends to most. One self-contained HTML file that needs no network; or the same page from a server.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "headway/attention.h"
#include "headway/cxx20.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

// One call of attention: query [B,H,Sq,D] and key [B,Hkv,Sk,D], or with fewer axes. A page of a model has one for each
// of its layers, all with the same Sq and Sk. Tensors on a CUDA device stay there and are analyzed there.
struct ViewLayer {
  ConstTensorView query, key;
  AttentionOptions options = {};  // progress is set in the request, not here
};

struct ViewRequest {
  std::string title = "Attention";
  std::vector<std::string> key_tokens = {};    // one per key; without them positions are shown
  std::vector<std::string> query_tokens = {};  // one per query; by default the keys', if there are as many
  std::vector<std::string> head_names = {};    // one for each of the B * H heads of every layer; "layer 3, head 7"
  bool name_options = true;                    // say below the title which options the layers have
  bool overwrite = false;                      // an existing file is an error otherwise
  Progress progress = {};
};

// Analyzes the layers and writes the page. A small matrix is stored whole; a large one as exact means and maxima of
// cells, so that the file stays below 5 MB, with each row's strongest keys as long as there is room for them. Tokens
// are data: whatever they contain is shown, never executed.
void write_view(const std::filesystem::path& path, std::span<const ViewLayer> layers, const ViewRequest& request = {});

// The same for one call. Progress may be set in the options or in the request.
void write_view(const std::filesystem::path& path, ConstTensorView query, ConstTensorView key,
                const AttentionOptions& options = {}, const ViewRequest& request = {});

// An HTTP response.
struct ViewAnswer {
  int status = 200;
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string body = {};
};

// A local server of the page, without its sockets. The page requests the part that it shows, for any zoom level of any
// head, and gets exact cells, computed on request; if that would take too long, they are merged from a map that was
// computed with the overview. The tensors of the layers must stay alive and unchanged.
class LiveView {
 public:
  explicit LiveView(std::span<const ViewLayer> layers, const ViewRequest& request = {});  // analyzes the layers
  ~LiveView();
  LiveView(const LiveView&) = delete;
  LiveView& operator=(const LiveView&) = delete;

  // The page's address, for a server that listens at `own_host`, "127.0.0.1:8000": its path is random.
  std::string address(std::string_view own_host) const;

  // The answer to GET `target` with the header Host: `host`, which must be own_host or localhost or 127.0.0.1 with any
  // port. A request with another host name (from a foreign page whose host name resolves to this machine), another path
  // or an unknown part gets an error text. Several threads may call it.
  ViewAnswer answer(std::string_view target, std::string_view host, std::string_view own_host) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace headway
#pragma GCC visibility pop
