// torch_attention and torch_attention_backward: the calls that headway.torch records itself. Their options come as one
// tuple, which is read in place: a dictionary of keywords would cost more than a small attention.
#include <utility>

#include "calls.h"
#include "functions.h"
#include "method.h"

namespace headway::python {
namespace {

// The fields of headway.torch._core.Options, in its order.
enum class Field : Py_ssize_t {
  bias,
  sinks,
  mask,
  alibi_slopes,
  valid_lens,
  query_lens,
  spans,
  cu_seqlens_q,
  cu_seqlens_k,
  seed,
  causal,
  window_left,
  window_right,
  scale,
  softcap,
  dropout,
  engine,
  batch_invariant,
  span_rows,
  count
};

constexpr std::pair<Field, Option> as_they_are[] = {
    {Field::bias, Option::bias},
    {Field::sinks, Option::sinks},
    {Field::mask, Option::mask},
    {Field::alibi_slopes, Option::alibi_slopes},
    {Field::valid_lens, Option::valid_lens},
    {Field::query_lens, Option::query_lens},
    {Field::spans, Option::spans},
    {Field::span_rows, Option::span_rows},
    {Field::scale, Option::scale},
    {Field::softcap, Option::softcap},
    {Field::dropout, Option::dropout},
    {Field::engine, Option::engine},
    {Field::batch_invariant, Option::batch_invariant},
};

class TorchOptions {
 public:
  explicit TorchOptions(PyObject* tuple) : tuple_(tuple) {
    if (PyTuple_Check(tuple) == 0 || PyTuple_Size(tuple) != static_cast<Py_ssize_t>(Field::count)) {
      throw TypeMismatch("headway.torch: expected a tuple of its Options");
    }
  }

  bool packed() const { return at(Field::cu_seqlens_q) != Py_None; }

  // The options, and after `leading` tensors the bounds of packed sequences. This object must outlive the arguments.
  void fill(Arguments& arguments, std::size_t leading) {
    if (packed()) {
      arguments.set_leading(leading, at(Field::cu_seqlens_q));
      arguments.set_leading(leading + 1, at(Field::cu_seqlens_k));
    }
    for (const auto& [from, to] : as_they_are) {
      arguments.set_option(to, at(from));
    }
    PyObject* causal = at(Field::causal);
    if (PyUnicode_CompareWithASCIIString(causal, "none") != 0) {
      arguments.set_option(Option::causal, PyUnicode_CompareWithASCIIString(causal, "square") == 0 ? Py_True : causal);
    }
    if (at(Field::window_left) != Py_None || at(Field::window_right) != Py_None) {
      window_ = checked(PyTuple_Pack(2, at(Field::window_left), at(Field::window_right)));
      arguments.set_option(Option::window, window_.ptr());
    }
    if (at(Field::seed) != Py_None) {
      seed_ = seed_number(at(Field::seed));
      arguments.set_option(Option::seed, seed_.ptr());
    }
  }

 private:
  PyObject* at(Field field) const { return PyTuple_GetItem(tuple_, static_cast<Py_ssize_t>(field)); }

  // torch's integers have a sign: the 64 bits of one are the seed.
  static nb::object seed_number(PyObject* tensor) {
    const nb::object number = nb::borrow(tensor).attr("item")();
    const unsigned long long bits = PyLong_AsUnsignedLongLongMask(number.ptr());
    if (PyErr_Occurred() != nullptr) {
      throw nb::python_error();
    }
    return checked(PyLong_FromUnsignedLongLong(bits));
  }

  PyObject* tuple_;
  nb::object window_, seed_;
};

void require_count(const char* function, Py_ssize_t found, Py_ssize_t expected) {
  if (found != expected) {
    throw TypeMismatch(text(function, "() takes ", expected, " arguments, found ", found));
  }
}

// query, key, value, options, return_weights, return_lse, out or None -> (out, lse or None, weights or None)
PyObject* torch_attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  static const Signature& plain = *new Signature(forward_signature(false));
  static const Signature& varlen = *new Signature(forward_signature(true));
  return guarded([&]() -> nb::object {
    require_count("torch_attention", count, 7);
    TorchOptions options(values[3]);
    Arguments arguments(options.packed() ? varlen : plain);
    for (std::size_t i = 0; i < 3; ++i) {
      arguments.set_leading(i, values[i]);
    }
    options.fill(arguments, 3);
    arguments.set_own(0, values[4]);
    arguments.set_own(1, values[5]);
    arguments.set_own(2, values[6]);
    const Results found = forward(arguments, options.packed());
    const auto given = [](const nb::object& result) { return result.is_valid() ? result : nb::none(); };
    return nb::make_tuple(found.out, given(found.lse), given(found.weights));
  });
}

// grad_out, query, key, value, out, lse, options, gradients or None, bias_gradient -> the five gradients or None
PyObject* torch_attention_backward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  static const Signature& plain = *new Signature(backward_signature(false));
  static const Signature& varlen = *new Signature(backward_signature(true));
  return guarded([&]() -> nb::object {
    require_count("torch_attention_backward", count, 9);
    TorchOptions options(values[6]);
    Arguments arguments(options.packed() ? varlen : plain);
    for (std::size_t i = 0; i < 6; ++i) {
      arguments.set_leading(i, values[i]);
    }
    options.fill(arguments, 6);
    arguments.set_own(0, values[7]);
    arguments.set_own(1, values[8]);
    return backward(arguments, options.packed());
  });
}

}  // namespace

void add_torch_calls(nb::module_& module) {
  add_method(module, "torch_attention(query, key, value, options, return_weights, return_lse, out)",
             as_method(torch_attention), METH_FASTCALL, "For headway.torch.");
  add_method(module,
             "torch_attention_backward(grad_out, query, key, value, out, lse, options, gradients, bias_gradient)",
             as_method(torch_attention_backward), METH_FASTCALL, "For headway.torch.");
}

}  // namespace headway::python
