// KVCache for headway._cache: the C++ object inside the Python class.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "docstrings.h"
#include "functions.h"
#include "method.h"
#include "numpy.h"
#include "paged.h"
#include "rope.h"

namespace headway::python {
namespace {

std::filesystem::path path_of(const nb::bytes& path) { return std::string(path.c_str(), path.size()); }

// ids=: an integer, or integers.
class Ids {
 public:
  explicit Ids(const Argument& argument) {
    std::optional<Array> array;
    const ConstTensorView view = read_integers(argument, array);
    if (view.rank() > 1 || !is_integer(view.dtype())) {
      refuse<TypeMismatch>(argument, "has shape ", view.sizes(), " and type ", view.dtype(),
                           ", expected the integers that add() gave");
    }
    if (view.device() != Device{}) {
      refuse<InvalidArgument>(argument, "is on ", view.device(), ", expected integers in host memory");
    }
    const std::int64_t count = view.rank() == 0 ? 1 : view.size(0), stride = view.rank() == 0 ? 0 : view.stride(0);
    for (std::int64_t i = 0; i < count; ++i) {
      values.push_back(view.dtype() == DType::i64 ? view.as<std::int64_t>()[i * stride]
                                                  : view.as<std::int32_t>()[i * stride]);
    }
  }
  std::vector<std::int64_t> values;
};

DType read_dtype(const std::string& word) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    if (word == name(dtype)) {
      return dtype;
    }
  }
  throw TypeMismatch(text("KVCache: dtype is ", word, ", expected float32, float64, bfloat16 or float16"));
}

CacheFormat read_format(const std::string& word) {
  return word == "int8" ? CacheFormat::int8 : word == "fp8" ? CacheFormat::fp8 : CacheFormat::plain;
}

// The number of a CUDA device, or -1 for host memory.
Device read_device(std::int64_t index) {
  return index < 0 ? Device{} : Device{DeviceType::cuda, static_cast<int>(index)};
}

KVCacheConfig read_config(const nb::dict& settings) {
  KVCacheConfig config;
  config.device = read_device(nb::cast<std::int64_t>(settings["device"]));
  config.pages = nb::cast<std::int64_t>(settings["pages"]);
  config.page_size = nb::cast<std::int64_t>(settings["page_size"]);
  config.kv_heads = nb::cast<std::int64_t>(settings["kv_heads"]);
  config.head_dim = nb::cast<std::int64_t>(settings["head_dim"]);
  config.value_dim = nb::cast<std::optional<std::int64_t>>(settings["value_dim"]);
  config.dtype = read_dtype(nb::cast<std::string>(settings["dtype"]));
  config.quantize = read_format(nb::cast<std::string>(settings["quantize"]));
  if (!settings["rope"].is_none()) {
    config.rope = read_rope(nb::cast<nb::dict>(settings["rope"]));
  }
  if (const nb::object window = settings["window"]; !window.is_none()) {
    config.window = Window{.left = nb::cast<std::optional<std::int64_t>>(window[0]),
                           .right = nb::cast<std::optional<std::int64_t>>(window[1])};
  }
  config.first = nb::cast<std::int64_t>(settings["first"]);
  config.slack = nb::cast<std::int64_t>(settings["slack"]);
  config.value_in_key = nb::cast<std::optional<std::int64_t>>(settings["value_in_key"]);
  return config;
}

nb::dict described(const KVCache& cache) {
  const KVCacheConfig& config = cache.config();
  nb::dict result;
  result["pages"] = config.pages;
  result["page_size"] = config.page_size;
  result["kv_heads"] = config.kv_heads;
  result["head_dim"] = config.head_dim;
  result["value_dim"] = *config.value_dim;
  result["dtype"] = name(config.dtype);
  result["quantize"] = name(config.quantize);
  result["window"] = config.window ? nb::object(nb::make_tuple(config.window->left, config.window->right)) : nb::none();
  result["first"] = config.first;
  result["slack"] = config.slack;
  result["value_in_key"] = nb::cast(config.value_in_key);
  result["rope"] = config.rope.has_value();
  result["device"] = config.device == Device{} ? -1 : config.device.index;
  return result;
}

void append(KVCache& cache, nb::handle ids, nb::handle key, nb::handle value, nb::handle cu_seqlens) {
  constexpr const char* operation = "KVCache.append";
  CallStream stream;
  const Ids sequences({operation, "ids", ids, &stream});
  const Array key_array(Argument{operation, "key", key, &stream});
  std::optional<Array> value_array, bounds;
  CacheRows rows{.key = key_array.view()};
  if (!value.is_none()) {
    value_array.emplace(Argument{operation, "value", value, &stream});
    rows.value = value_array->view();
  }
  if (!cu_seqlens.is_none()) {
    rows.cu_seqlens = read_integers({operation, "cu_seqlens", cu_seqlens, &stream}, bounds);
  }
  rows.stream = stream.value();
  const Released released;
  cache.append(sequences.values, rows);
}

nb::object call_attend(const Arguments& arguments) {
  const nb::handle self = arguments.leading(0).object;
  const KVCache& cache = nb::cast<const KVCache&>(self);
  const Ids ids(arguments.leading(1));
  PagedCall call(arguments, arguments.leading(2),
                 {arguments.own(0), arguments.own(1), arguments.own(2), arguments.own(3)});
  return call.run(arguments, *cache.config().value_dim,
                  [&](ConstTensorView query, std::optional<ConstTensorView> bounds, TensorView out,
                      const AttentionOutputs& outputs) {
                    if (bounds) {
                      cache.attend_packed(ids.values, query, *bounds, out, call.options.values, outputs);
                    } else {
                      cache.attend(ids.values, query, out, call.options.values, outputs);
                    }
                  });
}

// As a NumPy array. NumPy has no bf16, so bf16 is converted to f32, which is exact.
nb::object as_numpy(const char* name, ConstTensorView view) {
  const DType dtype = view.dtype() == DType::bf16 ? DType::f32 : view.dtype();
  nb::list shape;
  for (const std::int64_t size : view.sizes()) {
    shape.append(size);
  }
  nb::object array = numpy().empty(shape, numpy().dtype(dtype));
  copy(view, Array(Argument{"KVCache.read", name, array}).writable_view());
  return array;
}

nb::tuple read(const KVCache& cache, std::int64_t id, std::int64_t begin, std::int64_t end) {
  const auto [key, value] = [&] {
    const Released released;
    return cache.read(id, begin, end);
  }();
  return nb::make_tuple(as_numpy("key", key), as_numpy("value", value));
}

}  // namespace

void add_cache(nb::module_& module) {
  // A cache has a lock, and attend takes the GIL now and then while it holds the lock, so a thread that waits for the
  // lock must not hold the GIL.
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<KVCache>(module, "Cache")
      .def("__init__", [](KVCache* self, const nb::dict& settings) { new (self) KVCache(read_config(settings)); })
      .def("described", &described)
      .def("free_pages", &KVCache::free_pages, NoGil())
      .def("ids", &KVCache::ids, NoGil())
      .def("length", &KVCache::length, NoGil())
      .def("add", &KVCache::add, NoGil())
      .def("fork", &KVCache::fork, NoGil())
      .def("truncate", &KVCache::truncate, NoGil())
      .def("remove", &KVCache::remove, NoGil())
      .def("append", &append, nb::arg("ids").none(), nb::arg("key").none(), nb::arg("value").none(),
           nb::arg("cu_seqlens").none())
      .def("read", &read)
      .def("save",
           [](const KVCache& self, const nb::bytes& path, bool overwrite) {
             const std::filesystem::path place = path_of(path);
             const Released released;
             self.save(place, overwrite);
           })
      .def_static("load", [](const nb::bytes& path, std::int64_t device) {
        return KVCache::load(path_of(path), read_device(device));
      });
  add_method<call_attend>(
      module,
      Signature("KVCache.attend", {{"cache"}, {"ids"}, {"query"}},
                {{"cu_seqlens"}, {"return_weights", "False"}, {"return_lse", "False"}, {"out"}}, absent_in_pages())
          .with_causal("'bottom_right'"),
      "For headway.KVCache.attend.", "attend_cache");
}

}  // namespace headway::python
