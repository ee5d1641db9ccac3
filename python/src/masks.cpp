// headway.masks: structured masks as Python values. The functions read arrays; headway/masks.py has their names.
#include "headway/masks.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>

#include "docstrings.h"
#include "functions.h"
#include "numpy.h"
#include "options.h"

namespace headway::python {
namespace {

// Arrays on a GPU come to the host: masks are made there.
masks::Integers integers(const char* function, const char* name, nb::handle object) {
  CallStream stream;
  std::optional<Array> array;
  const Argument argument{function, name, object, &stream};
  const ConstTensorView view = read_integers(argument, array);
  if (!is_integer(view.dtype())) {
    refuse<TypeMismatch>(argument, "has type ", array->type_text(), ", expected integers");
  }
  return view.device() == Device{} ? masks::Integers(view) : masks::Integers(copied_to(view, Device{}, stream.value()));
}

// Calls make(view) with the bools of an array.
template <class Make>
Mask from_bools(const char* function, const char* name, nb::handle object, const Make& make) {
  CallStream stream;
  const nb::object given = as_array({function, name, object, &stream});
  const Array array(Argument{function, name, given, &stream});
  const ConstTensorView view = array.view("bool (true = attend)");
  return view.device() == Device{} ? make(view) : make(copied_to(view, Device{}, stream.value()).view());
}

nb::object to_numpy(const Tensor& tensor) {
  nb::list shape;
  for (const std::int64_t size : tensor.sizes()) {
    shape.append(size);
  }
  nb::object made = numpy().empty(nb::tuple(shape), numpy().dtype(tensor.dtype()));
  const Array array(Argument{"Mask", "the result", made});
  copy(tensor, array.writable_view());
  return made;
}

const Mask& operand(nb::handle object) {
  if (nb::isinstance<Mask>(object)) {
    return nb::cast<const Mask&>(object);
  }
  throw TypeMismatch(text("masks: found a ", class_name(object),
                          ", expected a mask on both sides of & and |: masks.dense(array) is the mask of bools"));
}

// (spans or None, rows, bools or None)
nb::tuple parts_tuple(const MaskParts& parts) {
  return nb::make_tuple(parts.spans ? to_numpy(parts.spans->spans) : nb::none(), parts.spans ? parts.spans->rows : 1,
                        parts.bools ? to_numpy(*parts.bools) : nb::none());
}

nb::tuple packed_parts(const Mask& mask, nb::handle cu_seqlens_q, nb::handle cu_seqlens_k) {
  std::optional<Array> queries, keys;
  const ConstTensorView bounds_q = read_integers({"attention_varlen", "cu_seqlens_q", cu_seqlens_q}, queries);
  const ConstTensorView bounds_k = read_integers({"attention_varlen", "cu_seqlens_k", cu_seqlens_k}, keys);
  return parts_tuple(mask.parts(bounds_q, bounds_k));
}

[[noreturn]] void refuse_invert() {
  throw TypeMismatch(
      "masks: there is no ~: the complement of most masks takes many spans a row, or a hidden Sq x Sk array. Say what "
      "may be seen, or give masks.dense(~bools)");
}

[[noreturn]] void refuse_truth() {
  throw TypeMismatch("masks: a mask is neither true nor false: join masks by & and |, not by `and` and `or`");
}

// The arguments (queries, keys) of a method, read here so that their errors begin with the method's name.
struct Sizes {
  Sizes(const char* method, const nb::args& positional, const nb::kwargs& keywords) {
    constexpr std::array<const char*, 2> names = {"queries", "keys"};
    if (positional.size() > names.size()) {
      throw TypeMismatch(text(method, ": found ", positional.size(), " arguments, expected queries and keys"));
    }
    std::array<nb::object, 2> given;
    for (std::size_t i = 0; i < positional.size(); ++i) {
      given[i] = positional[i];
    }
    for (const auto& [keyword, value] : keywords) {
      const auto name = nb::cast<std::string>(keyword);
      const auto* slot = std::find(names.begin(), names.end(), name);
      if (slot == names.end() || given[static_cast<std::size_t>(slot - names.begin())].is_valid()) {
        throw TypeMismatch(text(method, ": found the keyword ", name, slot == names.end() ? "" : " a second time",
                                ", expected queries and keys"));
      }
      given[static_cast<std::size_t>(slot - names.begin())] = nb::borrow(value);
    }
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!given[i].is_valid() || given[i].is_none()) {
        throw TypeMismatch(text(method, ": ", names[i], " is missing, expected an integer"));
      }
      (i == 0 ? queries : keys) = read_count({method, names[i], given[i]}, 0);
    }
  }
  std::int64_t queries = 0, keys = 0;
};

void add_class(nb::module_& module) {
  nb::class_<Mask> mask(module, "Mask", nb::is_weak_referenceable(), docs::mask);
  mask.def(
          "__and__", [](const Mask& self, nb::handle other) { return self & operand(other); }, nb::arg().none())
      .def(
          "__or__", [](const Mask& self, nb::handle other) { return self | operand(other); }, nb::arg().none())
      .def(
          "__rand__", [](const Mask& self, nb::handle other) { return operand(other) & self; }, nb::arg().none())
      .def(
          "__ror__", [](const Mask& self, nb::handle other) { return operand(other) | self; }, nb::arg().none())
      .def("__invert__", [](const Mask&) { refuse_invert(); })
      .def("__bool__", [](const Mask&) { refuse_truth(); })
      .def("__copy__", [](const Mask& self) { return self; })
      .def("__deepcopy__", [](const Mask& self, nb::handle) { return self; })
      .def("__repr__", [](const Mask& self) { return to_string(self); })
      .def("__str__", [](const Mask& self) { return text(self); })
      .def_prop_ro("batch", &Mask::batch, docs::mask_batch)
      .def_prop_ro("heads", &Mask::heads, docs::mask_heads)
      .def(
          "pairs",
          [](const Mask& self, const nb::args& positional, const nb::kwargs& keywords) {
            const Sizes sizes("Mask.pairs", positional, keywords);
            return self.pairs(sizes.queries, sizes.keys);
          },
          nb::sig("def pairs(self, queries: int, keys: int) -> int"), docs::mask_pairs)
      .def(
          "draw",
          [](const Mask& self, const nb::args& positional, const nb::kwargs& keywords) {
            const Sizes sizes("Mask.draw", positional, keywords);
            return self.draw(sizes.queries, sizes.keys);
          },
          nb::sig("def draw(self, queries: int, keys: int) -> str"), docs::mask_draw)
      .def(
          "to_bool",
          [](const Mask& self, const nb::args& positional, const nb::kwargs& keywords) {
            const Sizes sizes("Mask.to_bool", positional, keywords);
            return to_numpy(self.to_bool(sizes.queries, sizes.keys));
          },
          nb::sig("def to_bool(self, queries: int, keys: int) -> object"), docs::mask_to_bool)
      .def(
          "spans",
          [](const Mask& self, const nb::args& positional, const nb::kwargs& keywords) {
            const Sizes sizes("Mask.spans", positional, keywords);
            const MaskSpans found = self.spans(sizes.queries, sizes.keys);
            return nb::make_tuple(to_numpy(found.spans), found.rows);
          },
          nb::sig("def spans(self, queries: int, keys: int) -> tuple"), docs::mask_spans);
  mask.attr("__module__") = "headway.masks";
  mask.attr("__array_ufunc__") = nb::none();  // array & mask comes to __rand__, not to each of the array's elements
}

}  // namespace

void add_masks(nb::module_& module) {
  add_class(module);
  // None is refused where it is read, with the argument's name.
  module.def("mask_parts", [](const Mask& mask, std::int64_t queries, std::int64_t keys) {
    return parts_tuple(mask.parts(queries, keys));
  });
  module.def("mask_packed_parts", &packed_parts, nb::arg(), nb::arg().none(), nb::arg().none());
  module.def("mask_causal", &masks::causal);
  module.def(
      "mask_window",
      [](nb::handle sides) {
        const Window window = read_window({"masks.window", "window", sides});
        return masks::window(window.left, window.right);
      },
      nb::arg().none());
  module.def(
      "mask_first", [](nb::handle n) { return masks::first(integers("masks.first", "n", n)); }, nb::arg().none());
  module.def(
      "mask_prefix", [](nb::handle n) { return masks::prefix(integers("masks.prefix", "n", n)); }, nb::arg().none());
  module.def(
      "mask_documents",
      [](nb::handle ids, nb::handle key_ids) {
        const masks::Integers queries = integers("masks.documents", "ids", ids);
        return key_ids.is_none() ? masks::documents(queries)
                                 : masks::documents(queries, integers("masks.documents", "key_ids", key_ids));
      },
      nb::arg().none(), nb::arg().none());
  module.def(
      "mask_documents_of",
      [](nb::handle lengths) { return masks::documents_of(integers("masks.documents", "lengths", lengths)); },
      nb::arg().none());
  module.def(
      "mask_blocks",
      [](nb::handle keep, std::int64_t query_size, std::int64_t key_size) {
        return from_bools("masks.blocks", "keep", keep,
                          [&](ConstTensorView bools) { return masks::blocks(bools, query_size, key_size); });
      },
      nb::arg().none(), nb::arg(), nb::arg());
  module.def(
      "mask_tree", [](nb::handle parents) { return masks::tree(integers("masks.tree", "parents", parents)); },
      nb::arg().none());
  module.def(
      "mask_spans",
      [](nb::handle spans, std::int64_t rows) { return masks::spans(integers("masks.spans", "array", spans), rows); },
      nb::arg().none(), nb::arg());
  module.def(
      "mask_dense", [](nb::handle bools) { return from_bools("masks.dense", "array", bools, masks::dense); },
      nb::arg().none());
  module.def(
      "mask_from_bool",
      [](nb::handle bools) { return from_bools("masks.from_bool", "array", bools, masks::from_bool); },
      nb::arg().none());
}

}  // namespace headway::python
