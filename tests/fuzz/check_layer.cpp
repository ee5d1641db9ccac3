// The layer against the oracle between textbook projections, forward and backward. The contract bounds attention alone,
// so each number here carries what it may be off by: what rounding to the type, f32 sums and the errors of its operands
// add up to.
#include <cmath>
#include <map>

#include "fuzz/check.h"
#include "headway/layer.h"
#include "headway/threads.h"

namespace headway::test::fuzz {
namespace {

// Values with the error of each.
struct Uncertain {
  Array value, error;
  explicit Uncertain(const Dims& sizes) : value(sizes), error(sizes) {}
  explicit Uncertain(Array exact) : value(std::move(exact)), error(value.sizes()) {}
};

struct Precision {
  explicit Precision(DType type) {
    const bool half = type == DType::bf16 || type == DType::f16;
    sum = type == DType::f64 ? 0x1p-53L : 0x1p-24L;
    store = type == DType::bf16 ? 0x1p-8L : type == DType::f16 ? 0x1p-11L : sum;
    quantum = type == DType::f64    ? 0x1p-1074L
              : type == DType::f16  ? 0x1p-24L
              : type == DType::bf16 ? 0x1p-133L
                                    : 0x1p-149L;
    sum_quantum = type == DType::f64 ? 0x1p-1074L : 0x1p-149L;
    attention = 64 * sum + (half ? 4 * store : 0);
  }
  Real sum, store, quantum, sum_quantum, attention;
};

// a [n, m] times b [m, o], or with either of them transposed, plus a vector, rounded to the type once.
struct Product {
  const Uncertain& a;
  bool a_transposed;
  const Uncertain& b;
  bool b_transposed;
  const Array* plus = nullptr;
};

Uncertain product(const Product& of, const Dims& sizes, const Precision& precision) {
  const std::int64_t rows = of.a.value.size(of.a_transposed), inner = of.a.value.size(!of.a_transposed);
  const std::int64_t columns = of.b.value.size(!of.b_transposed);
  Uncertain result(sizes);
  const std::int64_t a_row = of.a_transposed ? 1 : inner, a_step = of.a_transposed ? rows : 1;
  const std::int64_t b_column = of.b_transposed ? inner : 1, b_step = of.b_transposed ? 1 : columns;
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t column = 0; column < columns; ++column) {
      Real value = of.plus ? of.plus->values[static_cast<std::size_t>(column)] : 0, error = 0, size = std::abs(value);
      const Real *x = of.a.value.values.data() + row * a_row, *dx = of.a.error.values.data() + row * a_row;
      const Real *y = of.b.value.values.data() + column * b_column, *dy = of.b.error.values.data() + column * b_column;
      for (std::int64_t n = 0; n < inner; ++n, x += a_step, dx += a_step, y += b_step, dy += b_step) {
        value += *x * *y;
        size += std::abs(*x * *y);
        error += std::abs(*x) * *dy + std::abs(*y) * *dx + *dx * *dy;
      }
      const auto n = static_cast<std::size_t>(row * columns + column);
      const Real sums = precision.sum * static_cast<Real>(std::min<std::int64_t>(inner, 256) + 16);
      // Below the normal numbers each addition rounds by up to half a quantum of the sums' type.
      const Real quanta = 4 * precision.quantum + static_cast<Real>(inner) / 2 * precision.sum_quantum;
      result.value.values[n] = value;
      result.error.values[n] = error + sums * size + 2 * precision.store * (std::abs(value) + error) + quanta;
    }
  return result;
}

// [B*S, heads*D] as [B, heads, S, D], and back.
Array split(const Array& joined, std::int64_t batch, std::int64_t heads, std::int64_t width) {
  const std::int64_t length = batch == 0 ? 0 : joined.size(0) / batch;
  Array result({batch, heads, length, width});
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = 0; i < length; ++i)
        for (std::int64_t d = 0; d < width; ++d) result(b, h, i, d) = joined(b * length + i, h * width + d);
  return result;
}

Array join(const Array& heads) {
  Array result({heads.size(0) * heads.size(2), heads.size(1) * heads.size(3)});
  for (std::int64_t b = 0; b < heads.size(0); ++b)
    for (std::int64_t h = 0; h < heads.size(1); ++h)
      for (std::int64_t i = 0; i < heads.size(2); ++i)
        for (std::int64_t d = 0; d < heads.size(3); ++d)
          result(b * heads.size(2) + i, h * heads.size(3) + d) = heads(b, h, i, d);
  return result;
}

Uncertain split(const Uncertain& joined, std::int64_t batch, std::int64_t heads, std::int64_t width) {
  Uncertain result(split(joined.value, batch, heads, width));
  result.error = split(joined.error, batch, heads, width);
  return result;
}
Uncertain join(const Uncertain& heads) {
  Uncertain result(join(heads.value));
  result.error = join(heads.error);
  return result;
}

// Attention between uncertain operands. Only errors are propagated here; values come from the oracle.
class Attention {
 public:
  Attention(Spec spec, const Uncertain& q, const Uncertain& k, const Uncertain& v, const Precision& precision)
      : spec_(std::move(spec)),
        q_(q),
        k_(k),
        v_(v),
        precision_(precision),
        exact_(forward(spec_)),
        sizes_(scores(spec_).magnitudes),
        growth_({spec_.batch(), spec_.heads(), spec_.q.size(2)}) {
    each_row([&](std::int64_t b, std::int64_t h, std::int64_t i) { growth_(b, h, i) = growth(b, h, i); });
  }

  // Whether every weight is known to within a tenth of itself.
  bool known() const {
    for (Real one : growth_.values)
      if (!(one < 0.1L)) return false;
    return exact_.largest_score < 1e30L;
  }

  Uncertain context() const;
  struct Gradients {
    Uncertain dq, dk, dv;
  };
  Gradients gradients(const Uncertain& dcontext) const;

 private:
  template <class Visit>
  void each_row(Visit visit) const {
    for (std::int64_t b = 0; b < spec_.batch(); ++b)
      for (std::int64_t h = 0; h < spec_.heads(); ++h)
        for (std::int64_t i = 0; i < spec_.q.size(2); ++i) visit(b, h, i);
  }
  std::int64_t kv_head(std::int64_t h) const { return h / (spec_.heads() / spec_.kv_heads()); }

  // sum_d |a| db + |b| da + da db
  static Real product_error(const Uncertain& a, std::int64_t a_row, const Uncertain& b, std::int64_t b_row,
                            std::int64_t width) {
    Real error = 0;
    for (std::int64_t d = 0; d < width; ++d) {
      const auto x = static_cast<std::size_t>(a_row * width + d), y = static_cast<std::size_t>(b_row * width + d);
      error += std::abs(a.value.values[x]) * b.error.values[y] + std::abs(b.value.values[y]) * a.error.values[x] +
               a.error.values[x] * b.error.values[y];
    }
    return error;
  }
  std::int64_t row_number(const Array& array, std::int64_t b, std::int64_t h, std::int64_t i) const {
    return (b * array.size(1) + h) * array.size(2) + i;
  }
  // The relative error of the weights of a row: twice the largest of a score.
  Real growth(std::int64_t b, std::int64_t h, std::int64_t i) const {
    Real worst = spec_.sinks ? 8 * precision_.sum * std::abs((*spec_.sinks)(h)) : 0;  // a sink is a score too
    for (std::int64_t j = 0; j < spec_.k.size(2); ++j) {
      if (!allowed(spec_, b, h, i, j)) continue;
      const Real operands = product_error(q_, row_number(q_.value, b, h, i), k_, row_number(k_.value, b, kv_head(h), j),
                                          spec_.head_dim());
      worst = std::max(worst, std::abs(spec_.scale) * operands + 8 * precision_.sum * sizes_(b, h, i, j));
    }
    return std::expm1(2 * worst) + 64 * precision_.sum;
  }

  Spec spec_;
  const Uncertain &q_, &k_, &v_;
  Precision precision_;
  Forward exact_;
  Array sizes_, growth_;
};

Uncertain Attention::context() const {
  Uncertain result(exact_.out.value);
  const std::int64_t width = spec_.value_dim();
  each_row([&](std::int64_t b, std::int64_t h, std::int64_t i) {
    for (std::int64_t d = 0; d < width; ++d) {
      Real error = 0, size = 0;
      for (std::int64_t j = 0; j < spec_.k.size(2); ++j) {
        const Real p = exact_.weights.value(b, h, i, j) * kept(spec_, b, h, i, j);
        const Real v = std::abs(v_.value(b, kv_head(h), j, d)), dv = v_.error(b, kv_head(h), j, d);
        error += p * (growth_(b, h, i) * v + (1 + growth_(b, h, i)) * dv);
        size += p * v;
      }
      result.error(b, h, i, d) = error + (precision_.attention + 2 * precision_.store) * size + 4 * precision_.quantum;
    }
  });
  return result;
}

Attention::Gradients Attention::gradients(const Uncertain& dcontext) const {
  const Backward exact = backward(spec_, dcontext.value);
  Gradients result{Uncertain(exact.dq.value), Uncertain(exact.dk.value), Uncertain(exact.dv.value)};
  const std::int64_t width = spec_.head_dim(), keys = spec_.k.size(2);
  const Real scale = std::abs(spec_.scale), unit = precision_.attention;
  each_row([&](std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::int64_t g = kv_head(h), row = row_number(dcontext.value, b, h, i);
    const Real growth_here = growth_(b, h, i);
    std::vector<Real> dp_size(static_cast<std::size_t>(keys)), dp_error(dp_size);
    Real delta_size = 0, delta_error = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
      const auto n = static_cast<std::size_t>(j);
      if (!allowed(spec_, b, h, i, j)) continue;
      const Real keep = kept(spec_, b, h, i, j), p = exact_.weights.value(b, h, i, j);
      for (std::int64_t d = 0; d < width; ++d)
        dp_size[n] += keep * std::abs(dcontext.value(b, h, i, d) * v_.value(b, g, j, d));
      dp_error[n] = keep * product_error(dcontext, row, v_, row_number(v_.value, b, g, j), width) + unit * dp_size[n];
      delta_size += p * dp_size[n];
      delta_error += p * dp_error[n];
    }
    delta_error += (growth_here + 2 * unit) * delta_size;
    for (std::int64_t j = 0; j < keys; ++j) {
      if (!allowed(spec_, b, h, i, j)) continue;
      const auto n = static_cast<std::size_t>(j);
      const Real keep = kept(spec_, b, h, i, j), p = exact_.weights.value(b, h, i, j);
      const Real ds_size = p * (dp_size[n] + delta_size);
      const Real ds_error =
          p * (dp_error[n] + delta_error) * (1 + growth_here) + (growth_here + 2 * unit) * ds_size + precision_.quantum;
      // 1 - tanh^2 changes by at most 2 / softcap times the change of its score, and a score's error is below `growth`.
      const Real cap_error = spec_.softcap ? 2 * growth_here / static_cast<Real>(*spec_.softcap) * ds_size : 0;
      for (std::int64_t d = 0; d < width; ++d) {
        const Real k = std::abs(k_.value(b, g, j, d)), q = std::abs(q_.value(b, h, i, d));
        const Real error = ds_error + cap_error, size = (1 + 2 * unit) * ds_size + error;
        result.dq.error(b, h, i, d) +=
            scale * (error * k + size * (k_.error(b, g, j, d) + unit * k)) + precision_.quantum;
        result.dk.error(b, g, j, d) +=
            scale * (error * q + size * (q_.error(b, h, i, d) + unit * q)) + precision_.quantum;
        const Real gradient = std::abs(dcontext.value(b, h, i, d)), gradient_error = dcontext.error(b, h, i, d);
        result.dv.error(b, g, j, d) +=
            keep * p * ((growth_here + 2 * unit) * gradient + (1 + growth_here) * gradient_error) + precision_.quantum;
      }
    }
  });
  return result;
}

// A layer of the case with its inputs.
struct LayerCase {
  explicit LayerCase(const Case& one, Engine engine)
      : what(one),
        layer({.model_dim = one.model,
               .heads = one.h,
               .kv_heads = one.hkv,
               .head_dim = one.d,
               .key_dim = one.key_dim,
               .value_dim = one.value_dim,
               .bias = one.biased,
               .dtype = one.type,
               .initializer = Initializer::torch_linear,
               .seed = one.seed}),
        x_q({one.b, one.sq, one.model}, one.type, one.q_layout),
        x_k({one.b, one.sk, one.key_dim}, one.type, one.k_layout),
        x_v({one.b, one.sk, one.value_dim}, one.type, one.v_layout),
        dy({one.b, one.sq, one.model}, one.type, one.grad_layout) {
    Random q = stream(one, 1), k = stream(one, 2), v = stream(one, 3), grad = stream(one, 4);
    fill(x_q.view(), one.q, one.q_size, q);
    fill(x_k.view(), one.k, one.k_size, k);
    fill(x_v.view(), one.v, one.v_size, v);
    fill(dy.view(), one.grad, one.grad_size, grad);
    queries = keys = values = x_q.view();
    if (one.sharing != Sharing::all) {
      keys = x_k.view();
      values = x_v.view();
    }
    const std::vector<std::int64_t> row_counts(static_cast<std::size_t>(one.b), one.sq),
        key_counts(row_counts.size(), one.sk);
    make_options(one, row_counts, key_counts, tensors, options);
    options.engine = engine;
    if (engine == Engine::cuda) to_device();
  }
  LayerCase(const LayerCase&) = delete;
  LayerCase& operator=(const LayerCase&) = delete;

  // On a device every tensor is there; lengths may stay.
  void to_device() {
    const Device device{DeviceType::cuda, 0};
    layer.to(device);
    const auto move = [&](ConstTensorView& view) {
      device_memory.push_back(copied_to(view, device));
      view = static_cast<const Tensor&>(device_memory.back()).view();
    };
    const bool one_tensor = what.sharing == Sharing::all;
    device_memory.reserve(10);
    move(queries);
    if (one_tensor)
      keys = values = queries;
    else
      move(keys), move(values);
    using View = std::optional<ConstTensorView>;
    for (View* option :
         std::initializer_list<View*>{&options.mask, &options.bias, &options.alibi_slopes, &options.sinks})
      if (*option) move(**option);
  }

  Case what;
  MultiHeadAttention layer;
  Strided x_q, x_k, x_v, dy;
  OptionTensors tensors;
  AttentionOptions options;
  ConstTensorView queries, keys, values;
  std::vector<Tensor> device_memory;
};

struct LayerResults {
  Tensor y;
  Gradients gradients;
};

LayerResults run(LayerCase& one) {
  const Device device = one.queries.device();
  ConstTensorView dy = std::as_const(one.dy).view();
  Tensor there;
  if (device.type == DeviceType::cuda) {
    there = copied_to(dy, device);
    dy = static_cast<const Tensor&>(there).view();
  }
  LayerResults results{one.layer.forward(one.queries, one.keys, one.values, one.options), one.layer.backward(dy)};
  if (device.type == DeviceType::cpu) return results;
  const auto home = [](Tensor& tensor) { tensor = copied_to(tensor, {}); };
  home(results.y), home(results.gradients.queries), home(results.gradients.keys), home(results.gradients.values);
  for (auto& [name, tensor] : results.gradients.parameters) home(tensor);
  return results;
}

std::vector<std::pair<std::string, ConstTensorView>> all_of(const LayerResults& results) {
  std::vector<std::pair<std::string, ConstTensorView>> list{{"output", results.y},
                                                            {"queries", results.gradients.queries},
                                                            {"keys", results.gradients.keys},
                                                            {"values", results.gradients.values}};
  for (const auto& [name, tensor] : results.gradients.parameters) list.emplace_back(name, tensor);
  return list;
}

std::optional<Failure> compare_bits(const std::string& check_name, const LayerResults& a, const LayerResults& b) {
  const auto ours = all_of(a), theirs = all_of(b);
  for (std::size_t n = 0; n < ours.size(); ++n)
    if (const auto text = differing(ours[n].second, theirs[n].second))
      return Failure{"layer, " + check_name + ", " + ours[n].first, *text};
  return std::nullopt;
}

// x [B,S,width] as [B*S, width].
Uncertain rows_of(ConstTensorView x) { return Uncertain(read(x).reshaped({x.size(0) * x.size(1), x.size(2)})); }

// y and every gradient as the textbook says.
class Textbook {
 public:
  explicit Textbook(const LayerCase& one) : one_(one), precision_(one.what.type) {}

  std::vector<ExpectedOfLayer> results() {
    const Case& what = one_.what;
    const std::int64_t width = what.h * what.d, kv_width = what.hkv * what.d;
    const Uncertain queries = rows_of(std::as_const(one_.x_q).view());
    const bool self = what.sharing == Sharing::all;
    const Uncertain keys = self ? queries : rows_of(std::as_const(one_.x_k).view());
    const Uncertain values = self ? queries : rows_of(std::as_const(one_.x_v).view());
    const Uncertain q = project(queries, "q", width), k = project(keys, "k", kv_width),
                    v = project(values, "v", kv_width);
    const Uncertain q4 = split(q, what.b, what.h, what.d), k4 = split(k, what.b, what.hkv, what.d),
                    v4 = split(v, what.b, what.hkv, what.d);
    const Attention attention(spec(q4, k4, v4), q4, k4, v4, precision_);
    if (!attention.known()) return {};  // scores so large that their rounding decides the weights
    const Uncertain context = join(attention.context());
    expect("output", project(context, "o", what.model));

    const Uncertain dy = rows_of(std::as_const(one_.dy).view());
    const Uncertain dcontext = back(dy, context, "o", "");
    const Attention::Gradients d = attention.gradients(split(dcontext, what.b, what.h, what.d));
    back(join(d.dq), queries, "q", "queries");
    back(join(d.dk), keys, "k", "keys");
    back(join(d.dv), values, "v", "values");
    return std::move(results_);
  }

 private:
  Array parameter(const std::string& name) const {
    return read(copied_to(std::as_const(one_.layer).parameter(name), {}));
  }

  Uncertain project(const Uncertain& x, const std::string& letter, std::int64_t columns) const {
    const Uncertain weight(parameter("W_" + letter));
    Array bias;
    if (one_.what.biased) bias = parameter("b_" + letter);
    return product({x, false, weight, false, one_.what.biased ? &bias : nullptr}, {x.value.size(0), columns},
                   precision_);
  }

  // Through y = x W + b: expects dW, db and, where it has a name, dx; returns dx.
  Uncertain back(const Uncertain& dy, const Uncertain& x, const std::string& letter, const std::string& dx_name) {
    const Uncertain weight(parameter("W_" + letter));
    const Uncertain dx = product({dy, false, weight, true}, x.value.sizes(), precision_);
    if (!dx_name.empty()) expect(dx_name, dx);
    expect("W_" + letter, product({x, true, dy, false}, weight.value.sizes(), precision_));
    if (one_.what.biased) {
      const Uncertain ones(Array({dy.value.size(0), 1}, 1));
      expect("b_" + letter, product({ones, true, dy, false}, {dy.value.size(1)}, precision_));
    }
    return dx;
  }

  void expect(const std::string& name, const Uncertain& result) {
    results_.push_back({name, {result.value, result.error}});
  }

  Spec spec(const Uncertain& q, const Uncertain& k, const Uncertain& v) const {
    // The options as the oracle reads them, with exact operands.
    AttentionOptions options;
    OptionTensors tensors;
    const std::vector<std::int64_t> rows(static_cast<std::size_t>(one_.what.b), one_.what.sq),
        keys(rows.size(), one_.what.sk);
    make_options(one_.what, rows, keys, tensors, options);
    const Tensor shape_q(q.value.sizes(), one_.what.type), shape_k(k.value.sizes(), one_.what.type);
    Spec result = spec_of(shape_q, shape_k, shape_k, options);
    result.q = q.value;
    result.k = k.value;
    result.v = v.value;
    return result;
  }

  const LayerCase& one_;
  Precision precision_;
  std::vector<ExpectedOfLayer> results_;
};

}  // namespace

std::vector<ExpectedOfLayer> expected_of_layer(const Case& one) {
  return Textbook(LayerCase(one, Engine::reference)).results();
}

std::optional<Failure> check_layer(const Prepared& prepared, Engine engine) {
  const Case& what = prepared.materials.what;
  LayerCase one(what, engine);
  const LayerResults results = run(one);
  const auto list = all_of(results);
  const std::map<std::string, ConstTensorView> found_results(list.begin(), list.end());
  for (const auto& [name, expected] : prepared.layer)
    if (const auto text = outside(found_results.at(name), expected)) return Failure{"layer, " + name, *text};
  if (auto found = compare_bits("again", run(one), results)) return found;
  if (engine == Engine::cuda) return std::nullopt;
  const Tensor inferred = one.layer.infer(one.queries, one.keys, one.values, one.options);
  if (auto text = differing(inferred, results.y)) return Failure{"layer, infer", *text};
  set_threads(3);
  const LayerResults threaded = run(one);
  set_threads(1);
  if (auto found = compare_bits("3 threads", threaded, results)) return found;
  Case plain = what;
  plain.q_layout = plain.k_layout = plain.v_layout = plain.grad_layout = plain.option_layout = Layout::contiguous;
  if (what.q_layout >= Layout::repeated || what.k_layout >= Layout::repeated || what.v_layout >= Layout::repeated ||
      what.grad_layout >= Layout::repeated)
    return std::nullopt;  // other numbers
  LayerCase contiguous(plain, engine);
  return compare_bits("other strides", run(contiguous), results);
}

}  // namespace headway::test::fuzz
