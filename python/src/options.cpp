#include "options.h"

#include <limits>
#include <string>

#include "numpy.h"

namespace headway::python {

std::string found(const Argument& argument) {
  const nb::object repr = checked(PyObject_Repr(argument.object.ptr()));
  const nb::object start = checked(PyUnicode_Substring(repr.ptr(), 0, 100));
  return to_string(start) + (nb::len(repr) > 100 ? "..." : "");
}

namespace {

nb::object to_numpy(const Argument& argument) {
  try {
    return numpy().asarray(argument.object);
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_ValueError)) {  // [[1], [1, 2]]
      refuse<InvalidArgument>(argument, "is ", found(argument), ", expected rows of equal length");
    }
    throw;
  }
}

}  // namespace

nb::object as_array(const Argument& argument) {
  return is_array(argument.object) ? nb::borrow(argument.object) : to_numpy(argument);
}

namespace {

constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();

// ---- Numbers ----

double read_number(const Argument& argument) {
  if (PyUnicode_Check(argument.object.ptr()) || PyBytes_Check(argument.object.ptr())) {
    refuse<TypeMismatch>(argument, "is ", found(argument), ", expected a number");
  }
  const double value = PyFloat_AsDouble(argument.object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    nb::python_error error;
    if (error.matches(PyExc_OverflowError)) {
      refuse<InvalidArgument>(argument, "is ", found(argument), ", expected a finite number");
    }
    refuse<TypeMismatch>(argument, "is a ", class_name(argument.object), ", expected a number");
  }
  return value;
}

// A Python int, or what can stand for one: np.int64(3), but not 3.0.
nb::object read_index(const Argument& argument, const char* expected) {
  nb::object index = nb::steal(PyNumber_Index(argument.object.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    refuse<TypeMismatch>(argument, "is ", found(argument), ", expected ", expected);
  }
  return index;
}

std::uint64_t read_seed(const Argument& argument) {
  const nb::object index = read_index(argument, "an integer");
  const unsigned long long value = PyLong_AsUnsignedLongLong(index.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse<InvalidArgument>(argument, "is ", found(argument), ", expected 0 to 2^64 - 1");
  }
  return value;
}

// ---- Words ----

Causal read_causal(const Argument& argument) {
  const nb::handle value = argument.object;
  if (value.is(Py_False) || !value.is_valid()) return Causal::none;
  if (value.is(Py_True)) return Causal::square;
  static constexpr const char* expected = ", expected False, True, 'top_left' or 'bottom_right'";
  if (nb::isinstance<nb::str>(value)) {
    const auto word = nb::cast<std::string>(value);
    if (word == "top_left") return Causal::top_left;
    if (word == "bottom_right") return Causal::bottom_right;
    refuse<InvalidArgument>(argument, "is ", found(argument), expected);
  }
  if (class_name(value) == "bool" || class_name(value) == "bool_") {  // NumPy's own
    return is_true(argument) ? Causal::square : Causal::none;
  }
  refuse<TypeMismatch>(argument, "is ", found(argument), expected);
}

Engine read_engine(const Argument& argument) {
  static constexpr const char* expected = ", expected 'reference', 'cpu', 'cuda' or None";
  if (!nb::isinstance<nb::str>(argument.object)) {
    refuse<TypeMismatch>(argument, "is ", found(argument), expected);
  }
  const auto word = nb::cast<std::string>(argument.object);
  for (const Engine engine : {Engine::reference, Engine::cpu, Engine::cuda}) {
    if (word == name(engine)) {
      return engine;
    }
  }
  refuse<InvalidArgument>(argument, "is ", found(argument), expected);
}

// ---- The window ----

std::optional<std::int64_t> read_side(const Argument& side) {
  if (side.object.is_none()) {
    return {};
  }
  const nb::object index = read_index(side, "an integer or None");
  const long long value = PyLong_AsLongLong(index.ptr());
  if (PyErr_Occurred() == nullptr) {
    return value;
  }
  PyErr_Clear();  // past 64 bits
  if (PyObject_RichCompareBool(index.ptr(), nb::int_(0).ptr(), Py_LT) == 1) {
    refuse<InvalidArgument>(side, "is ", found(side), ", expected 0 or more, or None for unlimited");
  }
  return largest;
}

// ---- Arrays ----

void open(const Argument& argument, nb::handle object, std::optional<Array>& array) {
  array.emplace(Argument{argument.operation, argument.name, object, argument.stream, argument.is_recorded});
}

MaskOption read_mask(const Argument& argument, std::optional<Array>& array) {
  if (nb::isinstance<Mask>(argument.object)) {
    return nb::cast<const Mask&>(argument.object);
  }
  open(argument, as_array(argument), array);
  return array->view("bool (true = attend); additive masks go into bias");
}

ConstTensorView read_floats(const Argument& argument, std::optional<Array>& array) {
  nb::object object = as_array(argument);
  if (!object.is(argument.object) && !nb::isinstance(argument.object, numpy().ndarray)) {
    const auto kind = nb::cast<std::string>(object.attr("dtype").attr("kind"));
    if (kind == "i" || kind == "u") {  // [1, 2]
      object = numpy().asarray(object, numpy().float64);
    }
  }
  open(argument, object, array);
  return array->view();
}

// Refuses the first entry that i64 does not hold: as another number it would be another position or document.
void refuse_past_int64(const Argument& argument, nb::handle integers) {
  const nb::module_ np = nb::module_::import_("numpy");
  const nb::object past = np.attr("greater")(integers, largest);
  if (PyObject_IsTrue(nb::object(past.attr("any")()).ptr()) == 0) {
    return;
  }
  const nb::object at = np.attr("unravel_index")(past.attr("argmax")(), past.attr("shape"));
  std::string entry = argument.name;
  for (std::size_t axis = 0; axis < nb::len(at); ++axis) {
    entry += (axis == 0 ? "[" : ", ") + std::to_string(nb::cast<std::int64_t>(nb::int_(at[axis])));
  }
  entry += nb::len(at) == 0 ? "" : "]";
  refuse<InvalidArgument>({argument.operation, entry.c_str(), argument.object}, "is ",
                          nb::cast<std::string>(nb::str(nb::object(integers[at]))), ", expected a number below 2^63");
}

// Any integers as i64.
nb::object as_int64(const Array& array) {
  if (array.device() != Device{}) {
    refuse<TypeMismatch>(array.argument(), "has type ", array.type_text(), ", expected i32 or i64 on ", array.device());
  }
  const nb::module_ np = nb::module_::import_("numpy");
  nb::object integers = nb::borrow(array.argument().object);
  if (!array.is_numpy()) {
    integers = np.attr("from_dlpack")(integers);
  }
  if (array.type() == dlpack::Type{dlpack::Code::unsigned_integer, 64, 1}) {
    refuse_past_int64(array.argument(), integers);
  }
  return numpy().asarray(integers, numpy().int64);
}

bool is_integer_type(const std::optional<dlpack::Type>& type) {
  return type && (type->code == dlpack::Code::integer || type->code == dlpack::Code::unsigned_integer);
}

// A list of Python ints. NumPy makes floats of an empty one, and objects of numbers past 64 bits.
nb::object integers_from(const Argument& argument) {
  nb::object object = to_numpy(argument);
  const auto kind = nb::cast<std::string>(object.attr("dtype").attr("kind"));
  if (nb::cast<std::int64_t>(object.attr("size")) == 0) {
    return numpy().asarray(object, numpy().int64);
  }
  if (kind == "O") {
    try {
      return numpy().asarray(argument.object, numpy().int64);
    } catch (nb::python_error& error) {
      if (error.matches(PyExc_OverflowError)) {
        refuse<InvalidArgument>(argument, "is ", found(argument), ", expected numbers below 2^63");
      }
      refuse<TypeMismatch>(argument, "is ", found(argument), ", expected integers");
    }
  }
  return object;
}

}  // namespace

Window read_window(const Argument& argument) {
  static constexpr const char* expected = ", expected a pair (left, right) of integers or None";
  if (PySequence_Check(argument.object.ptr()) == 0 || nb::isinstance<nb::str>(argument.object)) {
    refuse<TypeMismatch>(argument, "is ", found(argument), expected);
  }
  if (nb::len(argument.object) != 2) {
    refuse<InvalidArgument>(argument, "is ", found(argument), expected);
  }
  const std::string name = argument.name;
  const std::string left_name = name + " left", right_name = name + " right";
  const nb::object left = argument.object[0], right = argument.object[1];
  return {.left = read_side({argument.operation, left_name.c_str(), left}),
          .right = read_side({argument.operation, right_name.c_str(), right})};
}

Window read_pair(const Argument& argument) {
  const Window pair = read_window(argument);
  if (!pair.left || !pair.right) {
    refuse<TypeMismatch>(argument, "is ", found(argument), ", expected a pair (begin, end) of integers");
  }
  return pair;
}

std::int64_t read_count(const Argument& argument, std::int64_t fallback) {
  if (is_absent(argument)) {
    return fallback;
  }
  const nb::object index = read_index(argument, "an integer");
  const long long value = PyLong_AsLongLong(index.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse<InvalidArgument>(argument, "is ", found(argument), ", expected a number below 2^63");
  }
  return value;
}

ConstTensorView read_integers(const Argument& argument, std::optional<Array>& array) {
  if (is_array(argument.object)) {
    open(argument, argument.object, array);
  } else {
    open(argument, integers_from(argument), array);
  }
  if (is_integer_type(array->type()) && !dtype_from(array->type())) {
    const nb::object converted = as_int64(*array);
    open(argument, converted, array);
  }
  return array->view("integers");
}

Stage read_stage(const Argument& argument) {
  static constexpr const char* expected = ", expected 'scaled', 'capped', 'biased' or 'weights'";
  if (!argument.object.is_valid()) {
    return Stage::weights;
  }
  if (!nb::isinstance<nb::str>(argument.object)) {
    refuse<TypeMismatch>(argument, "is ", found(argument), expected);
  }
  const auto word = nb::cast<std::string>(argument.object);
  if (word == "scaled") return Stage::scaled;
  if (word == "capped") return Stage::capped;
  if (word == "biased") return Stage::biased;
  if (word == "weights") return Stage::weights;
  refuse<InvalidArgument>(argument, "is ", found(argument), expected);
}

Layout read_layout(const Arguments& arguments) {
  static constexpr const char* expected = ", expected 'bhsd' or 'bshd'";
  const Argument argument = arguments.option(Option::layout);
  if (!argument.object.is_valid()) {
    return Layout::bhsd;
  }
  if (!nb::isinstance<nb::str>(argument.object)) {
    refuse<TypeMismatch>(argument, "is ", found(argument), expected);
  }
  const auto word = nb::cast<std::string>(argument.object);
  if (word == "bhsd") return Layout::bhsd;
  if (word == "bshd") return Layout::bshd;
  refuse<InvalidArgument>(argument, "is ", found(argument), expected);
}

Options::Options(const Arguments& arguments) {
  const auto read = [&](Option option, auto& value, auto reader, auto&... array) {
    if (const Argument argument = arguments.option(option); !is_absent(argument)) {
      value = reader(argument, array...);
    }
  };
  read(Option::mask, values.mask, read_mask, mask_);
  read(Option::bias, values.bias, read_floats, bias_);
  values.causal = read_causal(arguments.option(Option::causal));
  read(Option::window, values.window, read_window);
  read(Option::valid_lens, values.valid_lens, read_integers, valid_lens_);
  read(Option::query_lens, values.query_lens, read_integers, query_lens_);
  read(Option::spans, values.spans, read_integers, spans_);
  values.span_rows = read_count(arguments.option(Option::span_rows), 1);
  read(Option::scale, values.scale, read_number);
  read(Option::softcap, values.softcap, read_number);
  read(Option::alibi_slopes, values.alibi_slopes, read_floats, alibi_slopes_);
  read(Option::sinks, values.sinks, read_floats, sinks_);
  read(Option::dropout, values.dropout, read_number);
  read(Option::seed, values.seed, read_seed);
  read(Option::engine, values.engine, read_engine);
  values.batch_invariant = is_true(arguments.option(Option::batch_invariant));
  values.stream = arguments.stream().value();
}

}  // namespace headway::python
