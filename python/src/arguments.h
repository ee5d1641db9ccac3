// The arguments of the public functions: names, positions and defaults in one table, read without building tuples or
// dictionaries. The error for an unknown keyword suggests the one that was probably meant.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "stream.h"

namespace headway::python {

struct Parameter {
  const char* name;
  const char* fallback = "None";  // as Python writes it; "" for an argument that must be given
};

// The options that every attention function takes, in the order of `options` in arguments.cpp.
enum class Option : std::size_t {
  mask,
  bias,
  causal,
  window,
  valid_lens,
  query_lens,
  spans,
  scale,
  softcap,
  alibi_slopes,
  sinks,
  dropout,
  seed,
  engine,  // from here on they stand after the function's own keywords
  batch_invariant,
  layout,
  span_rows,
  count
};

class Signature {
 public:
  // Arguments that must be given; then keywords: the options but those of `absent`, and what is the function's own.
  Signature(const char* function, std::vector<Parameter> leading, std::vector<Parameter> own,
            const std::vector<Option>& absent = {});
  // The same where `causal` is by default another one.
  Signature with_causal(const char* fallback) &&;

  const char* function() const { return function_; }
  std::string python_text() const;  // "attention(query, key, value, *, mask=None, ...)"

 private:
  friend class Arguments;
  std::size_t find(PyObject* name) const;  // size of the table if it has no such name
  [[noreturn]] void refuse_keyword(PyObject* name) const;

  const char* function_;
  std::size_t leading_, own_;
  std::vector<Parameter> parameters_;  // leading, options, own; without a name: an option that is absent
  std::vector<nb::object> names_;      // the same, as interned strings
};

// One call's values; null where an argument was not given.
class Arguments {
 public:
  Arguments(const Signature& signature, PyObject* const* values, Py_ssize_t positional, PyObject* keywords);
  // None yet, for a caller that records gradients itself and sets them one by one.
  explicit Arguments(const Signature& signature) : signature_(signature), is_recorded_(true) {}

  void set_leading(std::size_t index, PyObject* value) { values_[index] = value; }
  void set_option(Option option, PyObject* value) {
    values_[signature_.leading_ + static_cast<std::size_t>(option)] = value;
  }
  void set_own(std::size_t index, PyObject* value) { values_[signature_.own_ + index] = value; }

  const char* function() const { return signature_.function(); }
  Argument leading(std::size_t index) const { return at(index); }
  Argument option(Option option) const { return at(signature_.leading_ + static_cast<std::size_t>(option)); }
  Argument own(std::size_t index) const { return at(signature_.own_ + index); }
  // An array that the call makes itself.
  Argument made(const char* name) const { return {function(), name, {}, &stream_}; }
  const CallStream& stream() const { return stream_; }

 private:
  static constexpr std::size_t capacity = 32;

  Argument at(std::size_t index) const {
    return {signature_.function_, signature_.parameters_[index].name, values_[index], &stream_, is_recorded_};
  }

  const Signature& signature_;
  std::array<PyObject*, capacity> values_{};
  mutable CallStream stream_;  // known when the first array on a GPU has been read
  bool is_recorded_ = false;   // see Argument
};

// Not given, or given as None.
inline bool is_absent(const Argument& argument) { return !argument.object.is_valid() || argument.object.is_none(); }

// False unless given; what Python's bool() says then.
bool is_true(const Argument& argument);

}  // namespace headway::python
