// torch_sdpa, and the autograd node behind it: torch's scaled_dot_product_attention for plain tensors in eager mode,
// read and recorded without Python code, since small calls take less time than the Python code around them would.
// For all other calls (a compiler, torch.func, autocast, a subclass, leading axes that broadcast, an error) it returns
// None, and headway.torch takes its general path, which also raises the errors.
#include <algorithm>
#include <optional>
#include <utility>

#include "framework.h"
#include "functions.h"
#include "method.h"
#include "output.h"
#include "released.h"
#include "shapes.h"

namespace headway::python {
namespace {

// ---- The data from headway.torch ----

// Strings that attributes are looked up by.
struct Names {
  nb::object current_level = interned("_current_level"), requires_grad = interned("requires_grad");
  nb::object to_save = interned("to_save"), saved_tensors = interned("saved_tensors");
  nb::object materialize_grads = interned("materialize_grads"), needs_input_grad = interned("needs_input_grad");
  nb::object options = interned("options"), item = interned("item");

 private:
  static nb::object interned(const char* name) { return checked(PyUnicode_InternFromString(name)); }
};

// The current value of torch's many switches.
class Torch {
 public:
  explicit Torch(const nb::dict& from)
      : tensor_(from["Tensor"]),
        parameter_(from["Parameter"]),
        is_neg_(from["is_neg"]),
        is_grad_enabled_(from["is_grad_enabled"]),
        transforms_active_(from["transforms_active"]),
        modes_active_(from["modes_active"]),
        tracing_state_(from["tracing_state"]),
        autocast_active_(from["autocast_active"]),
        has_storage_(from["has_storage"]),
        forward_mode_(from["forward_mode"]),
        recorders_(from["recorders"]),
        draw_seed_(from["draw_seed"]),
        empty_like_(from["empty_like"]),
        gradient_places_(from["gradient_places"]),
        exchange_(exchange_api(tensor_)) {}

  bool is_usable() const { return exchange_ != nullptr && exchange_->tensor_from_object != nullptr; }
  bool is_plain(PyObject* object) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == tensor_.ptr() || type == parameter_.ptr();
  }
  bool is_negated(PyObject* tensor) const {
    return checked(PyObject_Vectorcall(is_neg_.ptr(), &tensor, 1, nullptr)).is(Py_True);
  }
  bool has_storage(PyObject* tensor) const {
    return checked(PyObject_Vectorcall(has_storage_.ptr(), &tensor, 1, nullptr)).is(Py_True);
  }
  bool requires_grad(PyObject* tensor) const {
    return checked(PyObject_GetAttr(tensor, names.requires_grad.ptr())).is(Py_True);
  }
  bool is_grad_enabled() const { return answer(is_grad_enabled_).is(Py_True); }
  // Whether something other than eager torch runs the call. The check for compilers is in Python, where they can trace
  // it.
  bool is_watched() const {
    return answer(transforms_active_).is(Py_True) || PyObject_IsTrue(answer(modes_active_).ptr()) != 0 ||
           !answer(tracing_state_).is_none() || in_forward_mode();
  }
  // The same, and what only matters to a forward.
  bool is_changed() const {
    return PyList_Size(recorders_.ptr()) != 0 || answer(autocast_active_).is(Py_True) || is_watched();
  }
  nb::object draw_seed() const {
    const nb::object seed = answer(draw_seed_);
    return checked(PyObject_CallMethodObjArgs(seed.ptr(), names.item.ptr(), nullptr));
  }
  nb::object empty_like(PyObject* tensor) const {
    return checked(PyObject_Vectorcall(empty_like_.ptr(), &tensor, 1, nullptr));
  }
  nb::object gradient_places(PyObject* query, PyObject* key, PyObject* value) const {
    PyObject* arguments[] = {query, key, value, Py_True};
    return checked(PyObject_Vectorcall(gradient_places_.ptr(), arguments, 4, nullptr));
  }

  const Names names;

 private:
  static nb::object answer(const nb::object& function) {
    return checked(PyObject_Vectorcall(function.ptr(), nullptr, 0, nullptr));
  }
  bool in_forward_mode() const {
    PyObject* level = PyDict_GetItemWithError(forward_mode_.ptr(), names.current_level.ptr());
    return level == nullptr || PyLong_AsLong(level) >= 0;
  }

  nb::object tensor_, parameter_, is_neg_, is_grad_enabled_, transforms_active_, modes_active_, tracing_state_,
      autocast_active_, has_storage_, forward_mode_, recorders_, draw_seed_, empty_like_, gradient_places_;
  const dlpack::ExchangeApi* exchange_;
};

const Torch* torch = nullptr;           // set once, when headway.torch is imported
nb::object* record_function = nullptr;  // torch's Function.apply of the node

// ---- A call ----

// The numbers among torch's keywords, as the node keeps them: (is_causal, scale, dropout_p, seed), or None for none.
struct Numbers {
  bool causal = false;
  std::optional<double> scale;
  double dropout = 0.0;
  nb::object seed;  // a Python int of 64 bits with a sign

  void fill(AttentionOptions& options) const {
    options.causal = causal ? Causal::top_left : Causal::none;
    options.scale = scale;
    options.dropout = dropout;
    if (seed.is_valid()) {
      options.seed = PyLong_AsUnsignedLongLongMask(seed.ptr());
    }
  }
  nb::object kept() const {
    if (!causal && !scale && dropout == 0.0) {
      return nb::none();
    }
    return nb::make_tuple(causal, scale ? nb::object(nb::float_(*scale)) : nb::none(), dropout,
                          seed.is_valid() ? seed : nb::none());
  }
  static Numbers from(nb::handle kept) {
    Numbers numbers;
    if (!kept.is_none()) {
      const nb::tuple values = nb::borrow<nb::tuple>(kept);
      numbers.causal = values[0].is(Py_True);
      if (!values[1].is_none()) {
        numbers.scale = PyFloat_AsDouble(nb::object(values[1]).ptr());
      }
      numbers.dropout = PyFloat_AsDouble(nb::object(values[2]).ptr());
      if (!values[3].is_none()) {
        numbers.seed = values[3];
      }
    }
    return numbers;
  }
};

// A number of Python's own types; others, as of NumPy, are left to the general path.
bool read_number(PyObject* object, double& number) {
  if (PyFloat_CheckExact(object)) {
    number = PyFloat_AsDouble(object);
    return true;
  }
  if (PyLong_CheckExact(object)) {
    number = PyLong_AsDouble(object);
    if (PyErr_Occurred() == nullptr) {
      return true;
    }
    PyErr_Clear();
  }
  return false;
}

bool read_flag(PyObject* object, bool& flag) {
  flag = object == Py_True;
  return flag || object == Py_False;
}

// How out or a gradient (B,H,S,width) lies in memory: as `like` (B,H,S,D) does; nothing where that is the usual order.
// headway.torch._core.empty_in_order says the same to compilers.
std::optional<Dims> strides_in_order(const ConstTensorView& like, std::int64_t width) {
  const std::int64_t batch = like.size(0), heads = like.size(1), length = like.size(2);
  const std::int64_t first = like.stride(0), second = like.stride(1), third = like.stride(2);
  if ((first >= second && second >= third) || like.elements() == 0) {
    return std::nullopt;
  }
  if (third > second && second > 0 && heads > 1 && length > 1 && (batch == 1 || first >= third)) {  // (B, S, H, D)
    return Dims{length * heads * width, width, heads * width, 1};
  }
  // Axes of size 1 may have any stride and expanded axes have none of their own. Both keep their position.
  int places[3] = {}, sorted[3] = {}, order[3] = {}, count = 0;
  for (int axis = 0; axis < 3; ++axis) {
    order[axis] = axis;
    if (like.size(axis) > 1 && like.stride(axis) > 0) {
      places[count++] = axis;
    }
  }
  std::copy(places, places + count, sorted);
  std::stable_sort(sorted, sorted + count, [&](int a, int b) { return like.stride(a) > like.stride(b); });
  for (int i = 0; i < count; ++i) {
    order[places[i]] = sorted[i];
  }
  if (order[0] == 0 && order[1] == 1) {
    return std::nullopt;
  }
  Dims strides = {0, 0, 0, 1};
  std::int64_t step = width;
  for (int i = 2; i >= 0; --i) {
    strides[order[i]] = step;
    step *= std::max<std::int64_t>(like.size(order[i]), 1);
  }
  return strides;
}

// A tensor's memory; InvalidArgument for one that is stored negated.
struct Opened : Array {
  Opened(const char* operation, const char* name, PyObject* tensor, CallStream& stream)
      : Array({operation, name, tensor, &stream, true}, Readable{}) {
    if (torch->is_negated(tensor)) {
      refuse<InvalidArgument>(argument(), "is stored negated");
    }
  }
};

// attn_mask in its place among the options.
class AttnMask {
 public:
  AttnMask(const char* operation, PyObject* tensor, CallStream& stream, AttentionOptions& options) {
    if (tensor == Py_None) {
      return;
    }
    array_.emplace(operation, "attn_mask", tensor, stream);
    constexpr dlpack::Type boolean{dlpack::Code::boolean, 8, 1};
    is_bias_ = array_->type() != boolean;
    if (is_bias_) {
      options.bias = array_->view();
    } else {
      options.mask = array_->view();
    }
  }

  bool is_bias() const { return is_bias_; }
  const Array& array() const { return *array_; }

 private:
  std::optional<Opened> array_;
  bool is_bias_ = false;
};

// A result with the type of `like` (B,H,S,D) and its order in memory, (B,H,S,width). If the shape is the same, it is
// torch's own tensor, for whose memory other streams can be recorded.
void make_like(std::optional<Output>& result, const char* operation, const char* name, const Array& like,
               const ConstTensorView& view, const Dims& sizes, CallStream& stream) {
  const std::optional<Dims> strides = view.rank() == 4 ? strides_in_order(view, sizes.back()) : std::nullopt;
  const bool same_order = strides ? *strides == view.strides() : view.is_contiguous();
  const bool is_small = view.elements() * static_cast<std::int64_t>(size_of(view.dtype())) < large_result;
  if (same_order && sizes == view.sizes() && (is_small || view.device() != Device{})) {
    const nb::object made = torch->empty_like(like.argument().object.ptr());
    result.emplace(Argument{operation, name, made, &stream, true}, Array::Readable{});
  } else {
    result.emplace(Argument{operation, name, {}, &stream}, like, view.dtype(), sizes, strides);
  }
}

// Whether query, key and value need no broadcasting.
bool is_direct(const Dims& query, const Dims& key, const Dims& value, bool grouped) {
  if (query.size() != 4 || key.size() != 4 || value.size() != 4 || query[0] != key[0] || query[0] != value[0] ||
      key[1] != value[1]) {
    return false;
  }
  return query[1] == key[1] || (grouped && key[1] > 0 && query[1] % key[1] == 0);
}

// ---- The calls ----

constexpr const char* forward_name = "attention";
constexpr const char* backward_name = "attention_backward";

// Without the GIL. Work that is only queued takes microseconds and needs no check for Ctrl-C, which would take the GIL.
template <class Body>
void run(const Array& query, AttentionOptions& options, const Body& body) {
  if (query.device() == Device{}) {
    const Released released(options);
    body();
  } else {
    const Released released;
    body();
  }
}

// Out; or None for the general path. Where a node is to record the call, `results` is what it takes beside the inputs.
nb::object attend(PyObject* const* values, nb::object& results) {
  PyObject *query = values[0], *key = values[1], *value = values[2], *attn_mask = values[3];
  Numbers numbers;
  bool grouped = false;
  const bool has_scale = values[6] != Py_None;
  if (!read_number(values[4], numbers.dropout) || !read_flag(values[5], numbers.causal) ||
      (has_scale && !read_number(values[6], numbers.scale.emplace())) || !read_flag(values[7], grouped)) {
    return nb::none();
  }
  if (!torch->is_plain(query) || !torch->is_plain(key) || !torch->is_plain(value) ||
      !(attn_mask == Py_None || torch->is_plain(attn_mask)) || torch->is_changed()) {
    return nb::none();
  }
  CallStream stream;
  const Opened q(forward_name, "query", query, stream), k(forward_name, "key", key, stream),
      v(forward_name, "value", value, stream);
  if (!is_direct(q.sizes(), k.sizes(), v.sizes(), grouped)) {
    return nb::none();
  }
  AttentionOptions options;
  const AttnMask mask(forward_name, attn_mask, stream, options);
  const bool recorded =
      torch->is_grad_enabled() && (torch->requires_grad(query) || torch->requires_grad(key) ||
                                   torch->requires_grad(value) || (mask.is_bias() && torch->requires_grad(attn_mask)));
  if (numbers.dropout > 0.0) {
    numbers.seed = torch->draw_seed();
  }
  numbers.fill(options);
  options.stream = stream.value();

  const ConstTensorView query_view = q.view(), value_view = v.view();
  const Dims sizes = out_sizes(query_view.sizes(), value_view.sizes());
  std::optional<Output> out, lse;
  make_like(out, forward_name, "out", q, query_view, sizes, stream);
  AttentionOutputs outputs;
  if (recorded) {
    lse.emplace(Argument{forward_name, "lse", {}, &stream}, q, statistics_type(query_view.dtype()),
                lse_sizes(query_view.sizes(), false));
    outputs.lse = lse->view();
  }
  run(q, options, [&] { attention(query_view, k.view(), value_view, out->view(), options, outputs); });
  if (!recorded) {
    return out->finish();
  }
  // In a tuple results are no inputs of the node.
  results =
      nb::make_tuple(out->finish(), lse->finish(), mask.is_bias() ? nb::none() : nb::borrow(attn_mask), numbers.kept());
  return nb::none();
}

// Out with its node. Saving tensors calls the caller's hooks, whose exceptions are the caller's too: torch's checkpoint
// ends a recomputation by one.
nb::object record(PyObject* const* values, const nb::object& results) {
  const bool is_mask = PyTuple_GetItem(results.ptr(), 2) != Py_None;
  PyObject* arguments[] = {values[0], values[1], values[2], is_mask ? Py_None : values[3], results.ptr()};
  return checked(PyObject_Vectorcall(record_function->ptr(), arguments, 5, nullptr));
}

// Whether something else than the compiled part must find the gradients.
bool needs_general_gradients(PyObject* grad_out) {
  return !torch->is_plain(grad_out) || torch->is_grad_enabled() || torch->is_watched() || !torch->has_storage(grad_out);
}

nb::object attribute(PyObject* context, const nb::object& name) {
  return checked(PyObject_GetAttr(context, name.ptr()));
}

// The gradients from a node's saved tensors.
nb::object gradients(PyObject* context, const nb::object& saved, PyObject* grad_out) {
  const nb::object needed = attribute(context, torch->names.needs_input_grad);
  const auto at = [&](Py_ssize_t index) { return PyTuple_GetItem(saved.ptr(), index); };
  CallStream stream;
  const char* operation = backward_name;
  const Opened grad(operation, "grad_out", grad_out, stream), q(operation, "query", at(0), stream),
      k(operation, "key", at(1), stream), v(operation, "value", at(2), stream), out(operation, "out", at(3), stream),
      lse(operation, "lse", at(4), stream);
  AttentionOptions options;
  const AttnMask mask(operation, at(6) != Py_None ? at(6) : at(5), stream, options);
  Numbers::from(attribute(context, torch->names.options)).fill(options);
  options.stream = stream.value();

  const ConstTensorView query = q.view(), key = k.view(), value = v.view();
  // Gradients of parts of one product are side by side, as the parts are: rare, and left to Python.
  nb::object places;
  const std::int64_t step = key.size(1) * key.size(3) * static_cast<std::int64_t>(size_of(key.dtype()));
  if (step > 0 && static_cast<const char*>(key.data()) + step == value.data()) {
    places = torch->gradient_places(at(0), at(1), at(2));
  }
  std::optional<Output> written[4];
  const auto add = [&](int index, const char* name, const Array& like, const ConstTensorView& view) {
    if (places.is_valid() && !nb::object(places[index]).is_none()) {
      const nb::object place = places[index];
      written[index].emplace(Argument{operation, name, place, &stream, true}, Array::Readable{});
    } else {
      make_like(written[index], operation, name, like, view, view.sizes(), stream);
    }
  };
  add(0, "the query's gradient", q, query);
  add(1, "the key's gradient", k, key);
  add(2, "the value's gradient", v, value);
  AttentionGradients views{.dq = written[0]->view(), .dk = written[1]->view(), .dv = written[2]->view()};
  if (mask.is_bias() && PyTuple_GetItem(needed.ptr(), 3) == Py_True) {
    add(3, "the bias's gradient", mask.array(), mask.array().view());
    views.dbias = written[3]->view();
  }
  run(q, options, [&] { attention_backward(grad.view(), query, key, value, out.view(), lse.view(), views, options); });
  return nb::make_tuple(written[0]->finish(), written[1]->finish(), written[2]->finish(),
                        written[3] ? written[3]->finish() : nb::none(), nb::none());
}

// None for calls that the general path refuses or computes.
template <class Body>
nb::object none_on_error(const Body& body) {
  try {
    return body();
  } catch (const Cancelled&) {
    throw;
  } catch (const Error&) {
    return nb::none();
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) {  // Ctrl-C
      throw;
    }
    return nb::none();
  }
}

// ---- The Python functions ----

// query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa -> out, or None
PyObject* torch_sdpa(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&]() -> nb::object {
    if (torch == nullptr || count != 8) {
      return nb::none();
    }
    nb::object results;
    const nb::object out = none_on_error([&] { return attend(values, results); });
    return results.is_valid() ? record(values, results) : out;
  });
}

// The node's forward: context, query, key, value, bias, (out, lse, mask, numbers) -> out
PyObject* torch_sdpa_node(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&]() -> nb::object {
    if (torch == nullptr || count != 6) {
      throw TypeMismatch(text("torch_sdpa_node() takes 6 arguments, found ", count));
    }
    const auto found = [&](Py_ssize_t index) { return PyTuple_GetItem(values[5], index); };
    const nb::object saved =
        checked(PyTuple_Pack(7, values[1], values[2], values[3], found(0), found(1), found(2), values[4]));
    const auto set = [&](const nb::object& name, PyObject* value) {
      if (PyObject_SetAttr(values[0], name.ptr(), value) != 0) {
        throw nb::python_error();
      }
    };
    set(torch->names.to_save, saved.ptr());
    set(torch->names.materialize_grads, Py_False);
    set(torch->names.options, found(3));
    return nb::borrow(found(0));
  });
}

// context, grad_out -> the gradients of the node's five inputs, or None
PyObject* torch_sdpa_backward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&]() -> nb::object {
    if (torch == nullptr || count != 2) {
      return nb::none();
    }
    const nb::object is_general =
        none_on_error([&]() -> nb::object { return nb::bool_(needs_general_gradients(values[1])); });
    if (!is_general.is(Py_False)) {
      return nb::none();
    }
    // Reading saved tensors calls the caller's hooks, too.
    const nb::object saved = attribute(values[0], torch->names.saved_tensors);
    return none_on_error([&] { return gradients(values[0], saved, values[1]); });
  });
}

// A dictionary of what Torch reads, and the node's apply.
PyObject* torch_prepare(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&]() -> nb::object {
    if (count != 2 || PyDict_Check(values[0]) == 0) {
      throw TypeMismatch("torch_prepare() takes a dictionary and a function");
    }
    // Never released: a thread may still be in a call when Python ends.
    const auto* found = new Torch(nb::borrow<nb::dict>(values[0]));
    record_function = new nb::object(nb::borrow(values[1]));
    torch = found->is_usable() ? found : nullptr;
    return nb::none();
  });
}

}  // namespace

void add_torch_eager(nb::module_& module) {
  const auto add = [&](const char* signature, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    add_method(module, signature, as_method(function), METH_FASTCALL, "For headway.torch.");
  };
  add("torch_prepare(switches, record)", torch_prepare);
  add("torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)", torch_sdpa);
  add("torch_sdpa_node(context, query, key, value, bias, results)", torch_sdpa_node);
  add("torch_sdpa_backward(context, grad_out)", torch_sdpa_backward);
}

}  // namespace headway::python
