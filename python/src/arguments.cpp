#include "arguments.h"

#include <iterator>
#include <utility>

#include "options.h"

namespace headway::python {
namespace {

constexpr Parameter option_parameters[] = {{"mask"},
                                           {"bias"},
                                           {"causal", "False"},
                                           {"window"},
                                           {"valid_lens"},
                                           {"query_lens"},
                                           {"spans"},
                                           {"scale"},
                                           {"softcap"},
                                           {"alibi_slopes"},
                                           {"sinks"},
                                           {"dropout", "0.0"},
                                           {"seed"},
                                           {"engine"},
                                           {"batch_invariant", "False"},
                                           {"layout", "'bhsd'"},
                                           {"span_rows", "1"}};
static_assert(std::size(option_parameters) == static_cast<std::size_t>(Option::count));

}  // namespace

Signature::Signature(const char* function, std::vector<Parameter> leading, std::vector<Parameter> own,
                     const std::vector<Option>& absent)
    : function_(function), leading_(leading.size()), own_(leading.size() + std::size(option_parameters)) {
  parameters_ = std::move(leading);
  parameters_.insert(parameters_.end(), std::begin(option_parameters), std::end(option_parameters));
  parameters_.insert(parameters_.end(), own.begin(), own.end());
  for (const Option option : absent) {
    parameters_[leading_ + static_cast<std::size_t>(option)].name = "";  // which is no keyword
  }
  for (const Parameter& parameter : parameters_) {
    names_.push_back(checked(PyUnicode_InternFromString(parameter.name)));
  }
}

Signature Signature::with_causal(const char* fallback) && {
  parameters_[leading_ + static_cast<std::size_t>(Option::causal)].fallback = fallback;
  return std::move(*this);
}

std::string Signature::python_text() const {
  const std::size_t last = leading_ + static_cast<std::size_t>(Option::engine);
  std::string result, separator = "*, ";  // before the first keyword
  const auto add = [&](const auto&... parts) { result += text(result.empty() ? "" : ", ", parts...); };
  const auto add_keywords = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      if (*parameters_[i].name != '\0') {
        add(std::exchange(separator, ""), parameters_[i].name, "=", parameters_[i].fallback);
      }
    }
  };
  for (std::size_t i = 0; i < leading_; ++i) {
    add(parameters_[i].name);
  }
  add_keywords(leading_, last);
  add_keywords(own_, parameters_.size());
  add_keywords(last, own_);
  return text(function_, "(", result, ")");
}

std::size_t Signature::find(PyObject* name) const {
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (names_[i].ptr() == name) {
      return i;
    }
  }
  for (std::size_t i = 0; i < names_.size(); ++i) {  // a name that is not interned, as from **{...}
    if (PyUnicode_Compare(names_[i].ptr(), name) == 0) {
      return i;
    }
  }
  return names_.size();
}

void Signature::refuse_keyword(PyObject* name) const {
  nb::list known;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (*parameters_[i].name != '\0') {
      known.append(names_[i]);
    }
  }
  const nb::object hint = nb::module_::import_("headway._suggest").attr("hint")(nb::borrow(name), known);
  throw TypeMismatch(text(function_, "() got an unexpected keyword argument '", to_string(name), "'", to_string(hint)));
}

Arguments::Arguments(const Signature& signature, PyObject* const* values, Py_ssize_t positional, PyObject* keywords)
    : signature_(signature) {
  const auto given = static_cast<std::size_t>(positional);
  if (given > signature.leading_) {
    throw TypeMismatch(text(signature.function_, "() takes ", signature.leading_, " positional arguments but ", given,
                            " were given; options are keywords"));
  }
  std::copy(values, values + given, values_.begin());
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_Size(keywords);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = PyTuple_GetItem(keywords, i);
    const std::size_t slot = signature.find(name);
    if (slot == signature.names_.size() || *signature.parameters_[slot].name == '\0') {
      signature.refuse_keyword(name);
    }
    if (values_[slot] != nullptr) {
      throw TypeMismatch(
          text(signature.function_, "() got multiple values for argument '", signature.parameters_[slot].name, "'"));
    }
    values_[slot] = values[given + static_cast<std::size_t>(i)];
  }
  for (std::size_t i = 0; i < signature.leading_; ++i) {
    if (values_[i] == nullptr) {
      throw TypeMismatch(
          text(signature.function_, "() missing required argument: '", signature.parameters_[i].name, "'"));
    }
  }
}

bool is_true(const Argument& argument) {
  if (!argument.object.is_valid()) {
    return false;
  }
  const int truth = PyObject_IsTrue(argument.object.ptr());
  if (truth < 0) {  // an array of several elements, a structured mask
    nb::python_error error;
    if (error.matches(PyExc_ValueError) || error.matches(PyExc_TypeError) || error.matches(PyExc_RuntimeError)) {
      refuse<TypeMismatch>(argument, "is ", found(argument), ", expected True or False");
    }
    throw error;
  }
  return truth == 1;
}

}  // namespace headway::python
