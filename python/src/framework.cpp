#include "framework.h"

#include <nanobind/ndarray.h>

#include <memory>
#include <string>

namespace headway::python {
namespace {

const dlpack::ExchangeApi* find_exchange_api(nb::handle type) {
  if (!nb::hasattr(type, "__dlpack_c_exchange_api__")) {
    return nullptr;
  }
  const nb::object capsule = type.attr("__dlpack_c_exchange_api__");
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) {
    throw nb::python_error();
  }
  while (api != nullptr && api->version.major != 1) {
    api = api->older;
  }
  return api;
}

}  // namespace

std::string root_module(nb::handle type) {
  const nb::object module = type.attr("__module__");
  const std::string name = nb::isinstance<nb::str>(module) ? nb::cast<std::string>(module) : "";
  return name.substr(0, name.find('.'));
}

nb::object loaded_module(const std::string& name) {
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  return modules.attr("get")(name.c_str());
}

namespace {

// A function or type of the array API's namespace, else of the type's own module, else none.
nb::object library_function(nb::handle like, const char* name) {
  if (nb::hasattr(like, "__array_namespace__")) {
    const nb::object space = like.attr("__array_namespace__")();
    if (nb::hasattr(space, name)) {
      return space.attr(name);
    }
  }
  const nb::object module = loaded_module(root_module(like.type()));
  return module.is_none() ? module : nb::getattr(module, name, nb::none());
}

nb::object importer(nb::handle like) {
  const nb::object found = library_function(like, "from_dlpack");
  return found.is_none() ? nb::object(nb::module_::import_("numpy").attr("from_dlpack")) : found;
}

}  // namespace

const dlpack::ExchangeApi* exchange_api(nb::handle type) {
  // Few types are used again and again: tensors and parameters. The reference keeps an address from being given to
  // another.
  struct Known {
    nb::object type;
    const dlpack::ExchangeApi* api = nullptr;
  };
  static Known(&known)[2] = *new Known[1][2];
  if (type.is(known[0].type)) {
    return known[0].api;
  }
  if (!type.is(known[1].type)) {
    const dlpack::ExchangeApi* api = find_exchange_api(type);
    if (api == nullptr) {
      return nullptr;
    }
    known[1] = {nb::borrow(type), api};
  }
  std::swap(known[0], known[1]);
  return known[0].api;
}

bool is_mutable(nb::handle object) {
  const std::string library = root_module(object.type());
  return library == "torch" || library == "cupy";
}

namespace {

// A flag that torch's tensors have and others' may not.
bool is_set(const nb::object& answer) {
  if (!answer.is_valid()) {
    PyErr_Clear();
    return false;
  }
  return answer.is(Py_True);
}

bool is_negated(const nb::object& object) {
  static const nb::object& is_neg = *new nb::object(checked(PyUnicode_InternFromString("is_neg")));
  return is_set(nb::steal(PyObject_CallMethodObjArgs(object.ptr(), is_neg.ptr(), nullptr)));
}

bool requires_gradient(const nb::object& object) {
  static const nb::object& requires_grad = *new nb::object(checked(PyUnicode_InternFromString("requires_grad")));
  return is_set(nb::steal(PyObject_GetAttr(object.ptr(), requires_grad.ptr())));
}

}  // namespace

nb::object readable(const Argument& argument) {
  nb::object object = nb::borrow(argument.object);
  if (is_negated(object)) {
    if (!argument.is_recorded) {
      refuse<InvalidArgument>(argument, "is stored negated: pass ", argument.name, ".resolve_neg()");
    }
    object = object.attr("detach")().attr("resolve_neg")();
  }
  if (!requires_gradient(object)) {
    return object;
  }
  if (argument.is_recorded) {
    const dlpack::ExchangeApi* exchange = exchange_api(object.type());
    const bool is_borrowed = exchange != nullptr && exchange->tensor_from_object != nullptr;
    return is_borrowed ? object : nb::object(object.attr("detach")());
  }
  const nb::object torch = loaded_module("torch");
  if (torch.is_none() || nb::cast<bool>(torch.attr("is_grad_enabled")())) {
    refuse<InvalidArgument>(argument, "requires grad, and this function records no gradients: use headway.torch, pass ",
                            argument.name, ".detach(), or call it under torch.no_grad()");
  }
  return object.attr("detach")();
}

std::optional<dlpack::Device> dlpack_device(nb::handle object) {
  if (!nb::hasattr(object, "__dlpack_device__")) {
    return {};
  }
  const nb::object pair = object.attr("__dlpack_device__")();
  const auto number = [&](int index) { return nb::cast<std::int32_t>(nb::int_(nb::object(pair[index]))); };
  return dlpack::Device{static_cast<dlpack::DeviceKind>(number(0)), number(1)};
}

nb::object dlpack_capsule(nb::handle object, std::optional<std::uintptr_t> stream) {
  const nb::object method = object.attr("__dlpack__");
  nb::dict keywords;
  if (stream) {
    keywords["stream"] = nb::int_(*stream);
  }
  keywords["max_version"] = nb::make_tuple(1, 0);
  try {
    return method(**keywords);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) {
      throw;
    }
  }
  nb::del(keywords["max_version"]);  // from before DLPack 1.0
  return method(**keywords);
}

nb::object empty_like(const Argument& argument, const Array& like, DType dtype, const Dims& sizes) {
  const nb::handle object = like.argument().object;
  const nb::object empty = library_function(object, "empty");
  if (empty.is_none() || root_module(object.type()) == "jax" || root_module(object.type()) == "jaxlib") {
    refuse<Unsupported>(argument, "cannot be made: ", root_module(object.type()), " has no arrays on ", like.device(),
                        " that may be written");
  }
  nb::list shape;
  for (const std::int64_t size : sizes) {
    shape.append(size);
  }
  nb::dict keywords;
  const bool same_type = dtype_from(like.type()) == dtype;
  keywords["dtype"] = same_type ? nb::object(object.attr("dtype"))
                                : library_function(object, dtype == DType::f64 ? "float64" : "float32");
  keywords["device"] = nb::getattr(object, "device", nb::none());
  try {
    return empty(nb::tuple(shape), **keywords);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) {
      throw;
    }
  }
  nb::del(keywords["device"]);  // a library whose arrays are made on its current device
  return empty(nb::tuple(shape), **keywords);
}

nb::object array_like(nb::handle like, Tensor&& tensor) {
  auto owned = std::make_unique<Tensor>(std::move(tensor));
  const dlpack::Type type = dlpack_type(owned->dtype());
  const auto rank = static_cast<std::size_t>(owned->rank());
  std::size_t sizes[Dims::max_rank] = {};
  for (std::size_t axis = 0; axis < rank; ++axis) {
    sizes[axis] = static_cast<std::size_t>(owned->size(static_cast<int>(axis)));
  }
  void* data = owned->data();
  const nb::capsule owner(owned.release(), [](void* memory) noexcept { delete static_cast<Tensor*>(memory); });
  const nb::ndarray<nb::array_api> array(data, rank, sizes, owner, nullptr,
                                         {static_cast<std::uint8_t>(type.code), type.bits, type.lanes});
  return importer(like)(nb::cast(array));
}

}  // namespace headway::python
