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

// The module that a type belongs to, without its submodules: "torch".
std::string root_module(nb::handle type) {
  const nb::object module = type.attr("__module__");
  const std::string name = nb::isinstance<nb::str>(module) ? nb::cast<std::string>(module) : "";
  return name.substr(0, name.find('.'));
}

// An imported module, or none; imports nothing.
nb::object loaded_module(const std::string& name) {
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  return modules.attr("get")(name.c_str());
}

// from_dlpack of the array API's namespace, else of the type's own module, else NumPy's.
nb::object importer(nb::handle like) {
  if (nb::hasattr(like, "__array_namespace__")) {
    const nb::object space = like.attr("__array_namespace__")();
    if (nb::hasattr(space, "from_dlpack")) {
      return space.attr("from_dlpack");
    }
  }
  const nb::object module = loaded_module(root_module(like.type()));
  if (!module.is_none() && nb::hasattr(module, "from_dlpack")) {
    return module.attr("from_dlpack");
  }
  return nb::module_::import_("numpy").attr("from_dlpack");
}

}  // namespace

const dlpack::ExchangeApi* exchange_api(nb::handle type) {
  // One type is used again and again. The reference keeps its address from being given to another.
  static nb::object& last_type = *new nb::object;
  static const dlpack::ExchangeApi* last_api = nullptr;
  if (!type.is(last_type)) {
    const dlpack::ExchangeApi* api = find_exchange_api(type);
    if (api == nullptr) {
      return nullptr;
    }
    last_api = api;
    last_type = nb::borrow(type);
  }
  return last_api;
}

bool is_torch(nb::handle object) { return root_module(object.type()) == "torch"; }

namespace {

// torch may store a tensor negated, and says so by a flag that DLPack does not carry.
void refuse_negated(const Argument& argument) {
  static const nb::object& name = *new nb::object(nb::steal(PyUnicode_InternFromString("is_neg")));
  const nb::object is_neg = nb::steal(PyObject_GetAttr(argument.object.ptr(), name.ptr()));
  if (!is_neg.is_valid()) {
    PyErr_Clear();
  } else if (nb::cast<bool>(is_neg())) {
    refuse<InvalidArgument>(argument, "is stored negated: pass ", argument.name, ".resolve_neg()");
  }
}

}  // namespace

nb::object without_gradient(const Argument& argument) {
  refuse_negated(argument);
  nb::object object = nb::borrow(argument.object);
  const nb::object requires_grad = nb::getattr(object, "requires_grad", nb::none());
  if (!requires_grad.is(Py_True)) {
    return object;
  }
  const nb::object torch = loaded_module("torch");
  if (torch.is_none() || nb::cast<bool>(torch.attr("is_grad_enabled")())) {
    refuse<InvalidArgument>(argument, "requires grad, and this function records no gradients: use headway.torch, pass ",
                            argument.name, ".detach(), or call it under torch.no_grad()");
  }
  return object.attr("detach")();
}

nb::object dlpack_capsule(nb::handle object) {
  const nb::object method = object.attr("__dlpack__");
  try {
    return method(nb::arg("max_version") = nb::make_tuple(1, 0));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) {
      throw;
    }
  }
  return method();  // from before DLPack 1.0
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
