#include "support/inputs.h"

#include <limits>

namespace headway::test {

Inputs random_inputs(const Shape& shape, DType dtype, std::uint64_t seed) {
  Random random(seed);
  return {normal({shape.batch, shape.heads, shape.queries, shape.head_dim}, dtype, random),
          normal({shape.batch, shape.kv_heads, shape.keys, shape.head_dim}, dtype, random),
          normal({shape.batch, shape.kv_heads, shape.keys, shape.value_dim}, dtype, random)};
}

ConstTensorView OptionSet::keep(Tensor tensor) {
  storage.push_back(std::make_unique<Tensor>(std::move(tensor)));
  return static_cast<const Tensor&>(*storage.back()).view();
}

std::vector<OptionSet> mask_kinds(const Shape& shape) {
  Random random(99);
  std::vector<OptionSet> kinds;
  const auto add = [&](const char* kind, auto fill) {
    OptionSet set{kind, {}, {}};
    fill(set);
    kinds.push_back(std::move(set));
  };
  const Dims full{shape.batch, shape.heads, shape.queries, shape.keys};
  const auto mask = [&](OptionSet& set) {
    Tensor values(full, DType::b8);
    fill_bool(values, random, 0.6);
    for (std::int64_t n = 0; n < values.elements(); ++n)
      if (const Dims index = index_of(n, full); index[3] == 1) values.at<bool>(index) = false;
    set.options.mask = set.keep(std::move(values));
  };
  const auto bias = [&](OptionSet& set) {
    Tensor values = normal({1, shape.heads, shape.queries, shape.keys}, DType::f64, random);
    for (std::int64_t n = 0; n < values.elements(); ++n) {
      const Dims index = index_of(n, values.sizes());
      if (index[3] == 2 || random() % 4 == 0) values.at<double>(index) = -std::numeric_limits<double>::infinity();
    }
    set.options.bias = set.keep(std::move(values));
  };
  const auto lens = [&](OptionSet& set) {
    Tensor values({shape.batch}, DType::i64);
    for (std::int64_t b = 0; b < shape.batch; ++b)
      values.at<std::int64_t>({b}) = std::max<std::int64_t>(shape.keys - 1 - b, 0);
    set.options.valid_lens = set.keep(std::move(values));
  };
  const auto query_lens = [&](OptionSet& set) {
    Tensor values({shape.batch}, DType::i32);
    for (std::int64_t b = 0; b < shape.batch; ++b)
      values.at<std::int32_t>({b}) = static_cast<std::int32_t>(std::max<std::int64_t>(shape.queries - 1 - b, 0));
    set.options.query_lens = set.keep(std::move(values));
  };
  add("mask", mask);
  add("bias of -inf", bias);
  add("top_left", [](OptionSet& set) { set.options.causal = Causal::top_left; });
  add("bottom_right", [&](OptionSet& set) {
    set.options.causal = Causal::bottom_right;
    lens(set);
    query_lens(set);
  });
  add("window", [](OptionSet& set) { set.options.window = Window{1, 1}; });
  add("left window", [](OptionSet& set) { set.options.window = Window{0, {}}; });
  add("valid_lens [B]", lens);
  add("valid_lens [B,Sq]", [&](OptionSet& set) {
    Tensor values({shape.batch, shape.queries}, DType::i32);
    for (std::int64_t n = 0; n < values.elements(); ++n)
      values.as<std::int32_t>()[n] = static_cast<std::int32_t>(n % shape.keys);
    set.options.valid_lens = set.keep(std::move(values));
  });
  add("query_lens", [&](OptionSet& set) {
    query_lens(set);
    lens(set);
  });
  add("all masks", [&](OptionSet& set) {
    mask(set);
    bias(set);
    lens(set);
    query_lens(set);
    set.options.causal = Causal::bottom_right;
    set.options.window = Window{4, 3};
  });
  return kinds;
}

std::vector<OptionSet> modifier_kinds(const Shape& shape) {
  Random random(98);
  std::vector<OptionSet> kinds;
  const auto add = [&](const char* kind, auto fill) {
    OptionSet set{kind, {}, {}};
    fill(set);
    kinds.push_back(std::move(set));
  };
  const auto bias = [&](OptionSet& set) {
    set.options.bias = set.keep(normal({shape.batch, 1, shape.queries, shape.keys}, DType::f64, random));
  };
  const auto alibi = [&](OptionSet& set) {
    set.options.alibi_slopes = set.keep(normal({shape.heads}, DType::f64, random, 0.3));
  };
  const auto sinks = [&](OptionSet& set) { set.options.sinks = set.keep(normal({shape.heads}, DType::f64, random)); };
  const auto dropout = [](OptionSet& set) {
    set.options.dropout = 0.4;
    set.options.seed = 0x123456789abcdefull;
  };
  add("nothing", [](OptionSet&) {});
  add("scale", [](OptionSet& set) { set.options.scale = -0.8; });
  add("softcap", [](OptionSet& set) { set.options.softcap = 1.5; });
  add("bias", bias);
  add("alibi", alibi);
  add("sinks", sinks);
  add("dropout", dropout);
  add("all modifiers", [&](OptionSet& set) {
    bias(set);
    alibi(set);
    sinks(set);
    dropout(set);
    set.options.scale = 0.6;
    set.options.softcap = 2.0;
  });
  return kinds;
}

std::vector<OptionSet> all_kinds(const Shape& shape) {
  std::vector<OptionSet> kinds = modifier_kinds(shape);
  for (OptionSet& one : mask_kinds(shape)) kinds.push_back(std::move(one));
  return kinds;
}

std::vector<Engine> tested_engines() { return engines(); }

std::vector<Engine> host_engines() {
  const Tensor one({1, 1, 1, 1});
  std::vector<Engine> result;
  for (Engine engine : engines()) {
    if (engine == Engine::automatic) continue;
    try {
      explain(one, one, one, {.engine = engine});
      result.push_back(engine);
    } catch (const Unsupported&) {  // an engine for tensors elsewhere
    }
  }
  return result;
}

}  // namespace headway::test
