// The public linear map: every check, then the engine of the tensors' device.
#include "core/linear.h"

#include "core/out_of_memory.h"
#include "core/overlap.h"
#include "core/text.h"

namespace headway {
namespace {

// [rows,in] seen as [1,rows,in].
template <class View>
View with_batch(const View& view) {
  return view.rank() == 2 ? view.unsqueeze(0) : view;
}

// Checks one call's tensors against x and the weight.
class Checked {
 public:
  Checked(const char* operation, const ConstTensorView& x, const ConstTensorView& weight)
      : operation_(operation), x_(x), weight_(weight) {
    if (x.rank() != 2 && x.rank() != 3) {
      refuse("expected x of shape [rows,in] or [B,S,in], found ", x.sizes());
    }
    if (weight.rank() != 2 || weight.size(0) != x.size(-1)) {
      refuse("expected a weight of shape [in,out] for x of shape ", x.sizes(), ", found ", weight.sizes());
    }
    if (!is_float(x.dtype())) {
      throw TypeMismatch(text(operation_, ": x has type ", x.dtype(), ", expected f32, f64, bf16 or f16"));
    }
    like_x("weight", weight);
  }

  // y, dy
  Dims rows_out() const {
    Dims sizes = x_.sizes();
    sizes[sizes.size() - 1] = weight_.size(1);
    return sizes;
  }

  void shape(const char* name, const ConstTensorView& view, const Dims& expected) const {
    like_x(name, view);
    if (view.sizes() != expected) {
      refuse(name, " has shape ", view.sizes(), ", expected ", expected);
    }
  }

  void output(const char* name, const ConstTensorView& view, const Dims& expected,
              std::initializer_list<ConstTensorView> inputs) const {
    shape(name, view, expected);
    if (shares_memory_with_itself(view)) {
      refuse(name, " has several elements at one place in memory");
    }
    for (const ConstTensorView& input : inputs) {
      if (share_memory(view, input)) {
        refuse(name, " overlaps an input");
      }
    }
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    throw InvalidArgument(text(operation_, ": ", parts...));
  }

  void like_x(const char* name, const ConstTensorView& view) const {
    if (view.dtype() != x_.dtype()) {
      throw TypeMismatch(text(operation_, ": ", name, " has type ", view.dtype(), ", x has ", x_.dtype()));
    }
    if (view.device() != x_.device()) {
      refuse(name, " is on ", view.device(), ", x is on ", x_.device());
    }
  }

  const char* operation_;
  const ConstTensorView& x_;
  const ConstTensorView& weight_;
};

}  // namespace

void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y) try {
  const Checked checked("linear", x, weight);
  if (bias) {
    checked.shape("bias", *bias, {weight.size(1)});
  }
  checked.output("y", y, checked.rows_out(), {x, weight, bias.value_or(x)});
  linear(Engine::automatic, with_batch(x), weight, bias, with_batch(y));
} catch (...) {
  throw_own_error("linear");
}

Tensor linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias) try {
  Tensor y = Tensor::uninitialized(Checked("linear", x, weight).rows_out(), x.dtype(), x.device());
  linear(x, weight, bias, y);
  return y;
} catch (...) {
  throw_own_error("linear");
}

void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight,
                     const LinearGradients& gradients) try {
  const Checked checked("linear_backward", x, weight);
  checked.shape("dy", dy, checked.rows_out());
  LinearGradients with_batches = gradients;
  if (gradients.dx) {
    checked.output("dx", *gradients.dx, x.sizes(), {dy, x, weight});
    with_batches.dx = with_batch(*gradients.dx);
  }
  if (gradients.dweight) {
    checked.output("dweight", *gradients.dweight, weight.sizes(), {dy, x, weight});
  }
  if (gradients.dbias) {
    checked.output("dbias", *gradients.dbias, {weight.size(1)}, {dy, x, weight});
  }
  linear_backward(Engine::automatic, with_batch(dy), with_batch(x), weight, with_batches);
} catch (...) {
  throw_own_error("linear_backward");
}

}  // namespace headway
