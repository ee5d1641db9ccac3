// rope, rope_backward and rope_frequencies for headway._rope.
#include "rope.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "functions.h"
#include "options.h"
#include "output.h"
#include "released.h"

namespace headway::python {
namespace {

RopeScaling read_scaling(const std::string& word) {
  if (word == "linear") return RopeScaling::linear;
  if (word == "dynamic") return RopeScaling::dynamic;
  if (word == "yarn") return RopeScaling::yarn;
  if (word == "llama3") return RopeScaling::llama3;
  return RopeScaling::none;
}

nb::object rotate(nb::handle x, nb::handle positions, const nb::dict& settings, bool back, nb::handle given_out) {
  const char* operation = back ? "rope_backward" : "rope";
  CallStream stream;
  const Array array(Argument{operation, back ? "grad_out" : "x", x, &stream});
  std::optional<Array> integers;
  const ConstTensorView places = read_integers({operation, "positions", positions, &stream}, integers);
  const RopeConfig config = read_rope(settings);
  const ConstTensorView view = array.view();
  const Argument out_argument{operation, "out", given_out, &stream};
  std::optional<Output> out;
  if (given_out.is_none()) {
    out.emplace(out_argument, array, view.dtype(), view.sizes());
  } else {
    out.emplace(out_argument);
  }
  {
    const Released released;
    if (back) {
      rope_backward(view, places, out->view(), config, stream.value());
    } else {
      rope(view, places, out->view(), config, stream.value());
    }
  }
  return out->finish();
}

}  // namespace

RopeConfig read_rope(const nb::dict& settings) {
  RopeConfig config;
  const auto read = [&](const char* name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    if (settings.contains(name) && !settings[name].is_none()) {
      field = nb::cast<Field>(settings[name]);
    }
  };
  read("base", config.base);
  read("dims", config.dims);
  read("interleaved", config.interleaved);
  read("factor", config.factor);
  read("original_length", config.original_length);
  read("length", config.length);
  read("beta_fast", config.beta_fast);
  read("beta_slow", config.beta_slow);
  read("truncate", config.truncate);
  read("attention_factor", config.attention_factor);
  read("mscale", config.mscale);
  read("mscale_all_dim", config.mscale_all_dim);
  read("low_freq_factor", config.low_freq_factor);
  read("high_freq_factor", config.high_freq_factor);
  config.scaling = read_scaling(nb::cast<std::string>(settings["scaling"]));
  return config;
}

void add_rope(nb::module_& module) {
  module.def("rotate", &rotate, nb::arg("x").none(), nb::arg("positions").none(), nb::arg("settings"), nb::arg("back"),
             nb::arg("out").none(), "For headway.rope and headway.rope_backward.");
  module.def(
      "rope_frequencies",
      [](std::int64_t head_dim, const nb::dict& settings) {
        const RopeFrequencies found = rope_frequencies(head_dim, read_rope(settings));
        return nb::make_tuple(found.frequencies, found.attention_factor);
      },
      nb::arg("head_dim"), nb::arg("settings"), "For headway.rope_frequencies.");
}

}  // namespace headway::python
