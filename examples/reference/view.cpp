#include "examples.h"

using namespace headway;

namespace {

void example_write_view() {
  const Tensor query({1, 4, 3, 16}), key({1, 4, 3, 16});
  write_view("attention.html", query, key, {.causal = Causal::square}, {.key_tokens = {"dogs", "chase", "cats"}});
  // A model: one entry for each of its layers.
  const std::vector<ViewLayer> layers = {{query, key}, {query, key}};
  write_view("model.html", layers, {.title = "Two layers"});
}

void example_LiveView() {
  const Tensor query({1, 4, 300, 16}), key({1, 4, 300, 16});
  const std::vector<ViewLayer> layers = {{query, key}};
  const LiveView page(layers);
  const std::string host = "127.0.0.1:8000";
  const std::string address = page.address(host);  // "http://127.0.0.1:8000/RANDOM/"
  const std::string path = address.substr(address.find(host) + host.size());
  std::cout << page.answer(path, host, host).status << '\n';                 // 200
  std::cout << page.answer("/", host, host).status << '\n';                  // 404
  std::cout << page.answer(path, "elsewhere.example", host).status << '\n';  // 403
}

}  // namespace

void view_examples() {
  example_write_view();
  example_LiveView();
}
