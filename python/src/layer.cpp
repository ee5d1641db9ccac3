// Layers as files, for the layer in NumPy: its parameters go through the library's own layer, whose files these are.
#include "headway/layer.h"

#include <nanobind/stl/string.h>

#include "functions.h"
#include "numpy.h"
#include "output.h"

namespace headway::python {
namespace {

std::filesystem::path path_of(const nb::bytes& path) { return std::string(path.c_str(), path.size()); }

// parameters: W_q, W_k, W_v, W_o and, with bias, b_q to b_o, as NumPy arrays.
void save_layer(const nb::dict& parameters, std::int64_t heads, const nb::bytes& path, bool overwrite) {
  constexpr const char* operation = "MultiHeadAttention.save";
  const auto array = [&](const char* name) {
    return Array(Argument{operation, name, parameters[name]});  // NOLINT: elided, it cannot move
  };
  const Array query = array("W_q"), key = array("W_k"), value = array("W_v");
  for (const Array* weight : {&query, &key, &value}) {
    if (weight->sizes().size() != 2) {
      refuse<InvalidArgument>(weight->argument(), "has shape ", weight->sizes(), ", expected (in, out)");
    }
  }
  MultiHeadAttention layer({.model_dim = query.sizes()[0],
                            .heads = heads,
                            .key_dim = key.sizes()[0],
                            .value_dim = value.sizes()[0],
                            .bias = parameters.contains("b_o"),
                            .dtype = query.view().dtype()});
  for (const auto& [name, to] : layer.parameters()) {
    const Array from = array(name.c_str());
    if (from.view().dtype() != to.dtype() || from.sizes() != to.sizes()) {
      refuse<InvalidArgument>(from.argument(), "is ", from.view().dtype(), " ", from.sizes(), ", expected ", to.dtype(),
                              " ", to.sizes());
    }
    copy(from.view(), to);
  }
  layer.save(path_of(path), overwrite);
}

nb::object as_numpy(const std::string& name, ConstTensorView view) {
  // bf16, which NumPy has not, in f32: the same numbers.
  const DType dtype = view.dtype() == DType::bf16 ? DType::f32 : view.dtype();
  nb::list shape;
  for (const std::int64_t size : view.sizes()) {
    shape.append(size);
  }
  nb::object array = numpy().empty(shape, numpy().dtype(dtype));
  copy(view, Array(Argument{"MultiHeadAttention.load", name.c_str(), array}).writable_view());
  return array;
}

// The parameters by name, and the number of heads.
nb::tuple load_layer(const nb::bytes& path) {
  const MultiHeadAttention layer = MultiHeadAttention::load(path_of(path));
  const MultiHeadAttentionConfig& config = layer.config();
  if (config.kv_heads != config.heads || config.head_dim * config.heads != config.model_dim) {
    throw InvalidArgument(text("MultiHeadAttention.load: the file's layer has ", config.heads, " heads of ",
                               config.head_dim, " and ", config.kv_heads, " of keys and values, expected as many, and ",
                               "their widths to add up to the model's ", config.model_dim));
  }
  nb::dict parameters;
  for (const auto& [name, view] : layer.parameters()) {
    parameters[name.c_str()] = as_numpy(name, view);
  }
  return nb::make_tuple(parameters, config.heads);
}

}  // namespace

void add_layer(nb::module_& module) {
  module.def("save_layer", &save_layer, nb::arg("parameters"), nb::arg("heads"), nb::arg("path"), nb::arg("overwrite"),
             "For headway.MultiHeadAttention.save.");
  module.def("load_layer", &load_layer, nb::arg("path"), "For headway.MultiHeadAttention.load.");
}

}  // namespace headway::python
