// The page that shows attention: layers as Python objects, the page as a file, and what a server of it answers.
#include "headway/view.h"

#include <nanobind/stl/string.h>

#include "arguments.h"
#include "docstrings.h"
#include "ending.h"
#include "functions.h"
#include "method.h"
#include "options.h"
#include "progress_bar.h"
#include "released.h"

namespace headway::python {
namespace {

// A layer and everything that it views, for as long as it lives.
struct OwnedLayer {
  explicit OwnedLayer(const Arguments& arguments)
      : layout(read_layout(arguments)), query(arguments.leading(0)), key(arguments.leading(1)), options(arguments) {}

  ViewLayer view() const {
    return {heads_second(query.view(), layout), heads_second(key.view(), layout), options.values};
  }

  Layout layout;
  Array query, key;
  Options options;
};

nb::object make_layer(const Arguments& arguments) {
  auto layer = std::make_unique<OwnedLayer>(arguments);
  layer->view();  // refuses element types that no tensor holds
  return nb::cast(layer.release(), nb::rv_policy::take_ownership);
}

std::vector<ViewLayer> views_of(const nb::list& layers) {
  std::vector<ViewLayer> views;
  for (const nb::handle layer : layers) {
    views.push_back(nb::cast<const OwnedLayer&>(layer).view());
  }
  return views;
}

std::vector<std::string> texts_of(const nb::list& strings) {
  std::vector<std::string> texts;
  for (const nb::handle string : strings) {
    texts.push_back(to_string(string));
  }
  return texts;
}

ViewRequest request_of(const nb::str& title, const nb::list& key_tokens, const nb::list& query_tokens,
                       const nb::list& head_names, bool name_options) {
  ViewRequest request;
  request.title = to_string(title);
  request.key_tokens = texts_of(key_tokens);
  request.query_tokens = texts_of(query_tokens);
  request.head_names = texts_of(head_names);
  request.name_options = name_options;
  return request;
}

// C++ exceptions become Python's, as in the other functions.
template <class Body>
void translated(const Body& body) {
  outliving_python([&] {
    try {
      body();
    } catch (const std::exception&) {
      set_python_error();
      throw nb::python_error();
    }
  });
}

void write(const nb::list& layers, const nb::bytes& path, const nb::str& title, const nb::list& key_tokens,
           const nb::list& query_tokens, const nb::list& head_names, bool name_options, bool overwrite,
           nb::handle progress) {
  const std::vector<ViewLayer> views = views_of(layers);
  ViewRequest request = request_of(title, key_tokens, query_tokens, head_names, name_options);
  request.overwrite = overwrite;
  const std::filesystem::path target(std::string(path.c_str(), path.size()));
  translated([&] {
    const ProgressBar bar("view", progress);
    const Released released(request.progress, bar.callable());
    write_view(target, views, request);
  });
}

// A LiveView and the layers that it views.
class OwnedLiveView {
 public:
  OwnedLiveView(const nb::list& layers, const nb::str& title, const nb::list& key_tokens, const nb::list& query_tokens,
                const nb::list& head_names, bool name_options, nb::handle progress)
      : layers_(layers) {
    const std::vector<ViewLayer> views = views_of(layers);
    ViewRequest request = request_of(title, key_tokens, query_tokens, head_names, name_options);
    translated([&] {
      const ProgressBar bar("view", progress);
      const Released released(request.progress, bar.callable());
      view_.emplace(std::span(views), request);
    });
  }

  std::string address(const std::string& own_host) const { return view_->address(own_host); }

  nb::tuple answer(const std::string& target, const std::string& host, const std::string& own_host) const {
    ViewAnswer answer;
    translated([&] {
      const Released released;
      answer = view_->answer(target, host, own_host);
    });
    nb::dict headers;
    for (const auto& [name, value] : answer.headers) {
      headers[name.c_str()] = value;
    }
    return nb::make_tuple(answer.status, headers, nb::bytes(answer.body.data(), answer.body.size()));
  }

 private:
  nb::object layers_;  // what they view stays
  std::optional<LiveView> view_;
};

}  // namespace

void add_view(nb::module_& module) {
  nb::class_<OwnedLayer>(module, "ViewLayer", docs::view_layer);
  add_method<make_layer>(module, {"view_layer", {{"query"}, {"key"}}, {}}, docs::view_layer);
  module.def("write_view", &write, nb::arg("layers"), nb::arg("path"), nb::arg("title"), nb::arg("key_tokens"),
             nb::arg("query_tokens"), nb::arg("head_names"), nb::arg("name_options"), nb::arg("overwrite"),
             nb::arg("progress").none(), docs::write_view);
  nb::class_<OwnedLiveView>(module, "LiveView", docs::live_view)
      .def(nb::init<const nb::list&, const nb::str&, const nb::list&, const nb::list&, const nb::list&, bool,
                    nb::handle>(),
           nb::arg("layers"), nb::arg("title"), nb::arg("key_tokens"), nb::arg("query_tokens"), nb::arg("head_names"),
           nb::arg("name_options"), nb::arg("progress").none())
      .def("address", &OwnedLiveView::address, nb::arg("own_host"))
      .def("answer", &OwnedLiveView::answer, nb::arg("target"), nb::arg("host"), nb::arg("own_host"));
}

}  // namespace headway::python
