// What the contract promises bit for bit: repeats, threads, calls at the same time, strides, weights and gradients
// asked for or not, an item of a batch or pack alone, keys in pages, whatever lies in forbidden positions, and -inf in
// a bias for false in a mask.
#include <cmath>
#include <exception>
#include <thread>

#include "fuzz/check.h"
#include "headway/threads.h"

namespace headway::test::fuzz {
namespace {

// One call in contiguous memory, with what it gives.
struct Contiguous {
  Contiguous(const Call& from, ConstTensorView grad)
      : q(copied_to(from.q, {})), k(copied_to(from.k, {})), v(copied_to(from.v, {})), grad_out(copied_to(grad, {})) {
    call = from;
    call.q = q.view();
    call.k = k.view();
    call.v = v.view();
    const auto own = [](std::optional<ConstTensorView>& view, Tensor& memory) {
      if (!view) return;
      memory = copied_to(*view, {});
      view = static_cast<const Tensor&>(memory).view();
    };
    own(call.options.mask, mask);
    own(call.options.bias, bias);
    own(call.options.valid_lens, valid_lens);
    own(call.options.query_lens, query_lens);
    own(call.options.spans, spans);
    own(call.options.alibi_slopes, slopes);
    own(call.options.sinks, sinks);
  }
  Contiguous(const Contiguous&) = delete;
  Contiguous& operator=(const Contiguous&) = delete;

  void run() {
    results = call.run(!call.packing);
    gradients = call.gradients(grad_out, results);
  }

  Tensor q, k, v, grad_out, mask, bias, valid_lens, query_lens, spans, slopes, sinks;
  Call call;
  Results results;
  GradientTensors gradients;
};

using Found = std::optional<Failure>;

struct Pair {
  const char* name;
  ConstTensorView actual, expected;
};

Found first_difference(const std::string& check_name, const std::vector<Pair>& pairs) {
  for (const Pair& one : pairs)
    if (const auto text = differing(one.actual, one.expected)) return Failure{check_name + ", " + one.name, *text};
  return std::nullopt;
}

std::vector<Pair> forward_pairs(const Results& a, const Results& b) {
  std::vector<Pair> pairs{{"out", a.out, b.out}, {"lse", a.lse, b.lse}};
  if (a.weights && b.weights) pairs.push_back({"weights", *a.weights, *b.weights});
  return pairs;
}

std::vector<Pair> gradient_pairs(const GradientTensors& a, const GradientTensors& b) {
  std::vector<Pair> pairs{{"dq", a.dq, b.dq}, {"dk", a.dk, b.dk}, {"dv", a.dv, b.dv}};
  if (a.dbias && b.dbias) pairs.push_back({"dbias", *a.dbias, *b.dbias});
  if (a.dsinks && b.dsinks) pairs.push_back({"dsinks", *a.dsinks, *b.dsinks});
  return pairs;
}

Found compare(const std::string& check_name, const Contiguous& a, const Contiguous& b) {
  if (Found found = first_difference(check_name, forward_pairs(a.results, b.results))) return found;
  return first_difference(check_name, gradient_pairs(a.gradients, b.gradients));
}

Found check_strides(Outputs& strided, const Contiguous& base) {
  std::vector<Pair> pairs{{"out", strided.out.view(), base.results.out},
                          {"lse", strided.lse.view(), base.results.lse},
                          {"dq", strided.dq.view(), base.gradients.dq},
                          {"dk", strided.dk.view(), base.gradients.dk},
                          {"dv", strided.dv.view(), base.gradients.dv}};
  if (base.results.weights) pairs.push_back({"weights", strided.weights.view(), *base.results.weights});
  if (base.gradients.dbias && base.gradients.dbias->dtype() == strided.dbias.view().dtype())
    pairs.push_back({"dbias", strided.dbias.view(), *base.gradients.dbias});
  if (base.gradients.dsinks) pairs.push_back({"dsinks", strided.dsinks.view(), *base.gradients.dsinks});
  return first_difference("other strides", pairs);
}

Found check_fewer_outputs(const Contiguous& base) {
  const Results without_weights = base.call.run(false);
  if (Found found = first_difference("without weights", forward_pairs(without_weights, base.results))) return found;
  Tensor out = filled(base.call.out_sizes(), base.call.q.dtype(), NAN);
  base.call.forward(out);
  if (Found found = first_difference("without lse", {{"out", out, base.results.out}})) return found;
  if (!base.results.weights) return std::nullopt;
  Tensor weights = filled(base.call.weights_sizes(), base.call.q.dtype(), NAN);
  base.call.forward(out, {.lse = {}, .weights = weights});
  return first_difference("weights without lse",
                          {{"out", out, base.results.out}, {"weights", weights, *base.results.weights}});
}

// Some of the gradients, drawn: those that are not asked for change nothing of the others.
Found check_fewer_gradients(const Prepared& prepared, const Contiguous& base) {
  Random random = stream(prepared.materials.what, 33);
  if (random() % 3 != 0) return std::nullopt;
  std::vector<Tensor> made;
  made.reserve(5);
  std::vector<Pair> pairs;
  AttentionGradients asked;
  const auto ask = [&](const char* gradient, std::optional<TensorView>& view, const Tensor& expected) {
    if (random() % 2 != 0) return;
    view = made.emplace_back(filled(expected.sizes(), expected.dtype(), NAN)).view();
    pairs.push_back({gradient, *view, expected});
  };
  const GradientTensors& all = base.gradients;
  ask("dq", asked.dq, all.dq);
  ask("dk", asked.dk, all.dk);
  ask("dv", asked.dv, all.dv);
  if (all.dbias) ask("dbias", asked.dbias, *all.dbias);
  if (all.dsinks) ask("dsinks", asked.dsinks, *all.dsinks);
  if (pairs.empty()) return std::nullopt;
  base.call.backward(base.grad_out, base.results.out, base.results.lse, asked);
  return first_difference("some gradients alone", pairs);
}

// The same call from other memory; on the CPU with more threads.
Found check_again(const Contiguous& base, int threads) {
  Contiguous again(base.call, base.grad_out);
  set_threads(threads);
  again.run();
  set_threads(1);
  return compare("again, " + std::to_string(threads) + (threads == 1 ? " thread" : " threads"), again, base);
}

// The same call from two threads at once: they share the workers, or one does without.
Found check_at_once(const Prepared& prepared, const Contiguous& base) {
  if (stream(prepared.materials.what, 34)() % 16 != 0) return std::nullopt;
  Contiguous first(base.call, base.grad_out), second(base.call, base.grad_out);
  std::exception_ptr failure;
  set_threads(3);
  std::thread other([&] {
    try {
      second.run();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  first.run();
  other.join();
  set_threads(1);
  if (failure) std::rethrow_exception(failure);
  if (Found found = compare("two at once", first, base)) return found;
  return compare("two at once", second, base);
}

// ---- One item alone ----

struct Item {
  std::int64_t b, q_begin, q_end, k_begin, k_end;  // rows of the pack
};

// Axes of masks and biases count from the last: key, row, head, item.
int batch_axis_of(ConstTensorView view, const Call& call) {
  return view.rank() - (!call.packing && call.q.rank() == 3 ? 3 : 4);
}

// Whether each item has its own part of a mask or bias.
bool has_items(ConstTensorView view, const Call& call, std::int64_t batch) {
  const int axis = batch_axis_of(view, call);
  return axis >= 0 && view.size(axis) == batch;
}

ConstTensorView of_item(ConstTensorView view, const Call& call, const Item& item, std::int64_t batch) {
  if (has_items(view, call, batch)) view = view.slice(batch_axis_of(view, call), item.b, item.b + 1);
  if (!call.packing) return view;
  const int last = view.rank() - 1;
  if (view.size(last) != 1) view = view.slice(last, 0, item.k_end - item.k_begin);
  if (last >= 1 && view.size(last - 1) != 1) view = view.slice(last - 1, 0, item.q_end - item.q_begin);
  return view;
}

// The part of a tensor that belongs to the item: of a pack as [1,H,S,D].
ConstTensorView part(ConstTensorView view, const Call& call, const Item& item, bool of_keys) {
  if (!call.packing) return view.slice(0, item.b, item.b + 1);
  return view.slice(0, of_keys ? item.k_begin : item.q_begin, of_keys ? item.k_end : item.q_end)
      .transpose(0, 1)
      .unsqueeze(0);
}

Found check_alone(const Prepared& prepared, const Contiguous& base) {
  const Call& call = base.call;
  const std::int64_t batch = prepared.spec.batch();
  if (call.q.rank() == 2 || batch == 0 || (batch == 1 && !call.packing)) return std::nullopt;
  // Dropout counts items; the first one has the same number alone.
  const std::int64_t b =
      call.options.dropout > 0
          ? 0
          : static_cast<std::int64_t>(prepared.materials.what.seed % static_cast<std::uint64_t>(batch));
  Item item{b, 0, 0, 0, 0};
  if (call.packing) {
    const auto at = static_cast<std::size_t>(b);
    item = {b, call.packing->starts_q[at], call.packing->starts_q[at + 1], call.packing->starts_k[at],
            call.packing->starts_k[at + 1]};
  }
  Call alone = call;
  alone.packing.reset();
  alone.q = part(call.q, call, item, false);
  alone.k = part(call.k, call, item, true);
  alone.v = part(call.v, call, item, true);
  using View = std::optional<ConstTensorView>;
  for (View* option : std::initializer_list<View*>{&alone.options.mask, &alone.options.bias})
    if (*option) *option = of_item(**option, call, item, batch);
  if (alone.options.valid_lens) {
    alone.options.valid_lens = alone.options.valid_lens->slice(0, b, b + 1);
    if (call.packing && alone.options.valid_lens->rank() == 2)
      alone.options.valid_lens = alone.options.valid_lens->slice(1, 0, item.q_end - item.q_begin);
  }
  if (alone.options.query_lens) alone.options.query_lens = alone.options.query_lens->slice(0, b, b + 1);
  if (alone.options.spans) {
    const ConstTensorView spans = *alone.options.spans;
    if (call.packing) {
      alone.options.spans = spans.slice(spans.rank() - 3, item.q_begin, item.q_end);
    } else if (spans.size(0) == batch) {
      alone.options.spans = spans.slice(0, b, b + 1);
    }
  }
  const Results results = alone.run(!call.packing);
  const GradientTensors gradients = alone.gradients(part(base.grad_out, call, item, false), results);
  const auto lse = call.packing ? base.results.lse.view().slice(1, item.q_begin, item.q_end).unsqueeze(0)
                                : base.results.lse.view().slice(0, b, b + 1);
  std::vector<Pair> pairs{{"out", part(base.results.out, call, item, false), results.out},
                          {"lse", lse, results.lse},
                          {"dq", part(base.gradients.dq, call, item, false), gradients.dq},
                          {"dk", part(base.gradients.dk, call, item, true), gradients.dk},
                          {"dv", part(base.gradients.dv, call, item, true), gradients.dv}};
  if (results.weights) pairs.push_back({"weights", part(*base.results.weights, call, item, false), *results.weights});
  if (gradients.dbias && has_items(*call.options.bias, call, batch))
    pairs.push_back({"dbias", of_item(*base.gradients.dbias, call, item, batch), *gradients.dbias});
  return first_difference(call.packing ? "a sequence alone" : "an item alone", pairs);
}

// ---- Forbidden values ----

// Row [b,head,row,:] of a tensor in the form of the call.
template <class View>
View vector_of(const Call& call, View view, std::int64_t b, std::int64_t head, std::int64_t row, bool of_keys) {
  if (call.packing) {
    const auto& starts = of_keys ? call.packing->starts_k : call.packing->starts_q;
    return view.select(0, starts[static_cast<std::size_t>(b)] + row).select(0, head);
  }
  if (view.rank() == 4) return view.select(0, b).select(0, head).select(0, row);
  if (view.rank() == 3) return view.select(0, b).select(0, row);
  return view.select(0, row);
}

ConstTensorView lse_of(const Call& call, ConstTensorView lse, std::int64_t b, std::int64_t head, std::int64_t row) {
  if (call.packing) {
    const std::int64_t at = call.packing->starts_q[static_cast<std::size_t>(b)] + row;
    return lse.select(0, head).slice(0, at, at + 1);
  }
  if (lse.rank() == 3) return lse.select(0, b).select(0, head).slice(0, row, row + 1);
  if (lse.rank() == 2) return lse.select(0, b).slice(0, row, row + 1);
  return lse.slice(0, row, row + 1);
}

void overwrite(TensorView vector, double value) {
  for (std::int64_t d = 0; d < vector.size(0); ++d) set(vector, {d}, value);
}

double odd_value(Random& random, DType type) { return value_of(static_cast<Odd>(random() % 5), type); }

// Keys and values that no row sees, and queries and grad_out of rows that see no key.
Found check_hidden(const Prepared& prepared, const Contiguous& base) {
  const Spec& spec = prepared.spec;
  const Sight& sight = prepared.sight;
  const Call& call = base.call;
  Contiguous changed(call, base.grad_out);
  Random random = stream(prepared.materials.what, 30);
  bool any = false;
  for (std::int64_t b = 0; b < spec.batch(); ++b) {
    for (std::int64_t g = 0; g < spec.kv_heads(); ++g)
      for (std::int64_t j = 0; j < spec.keys[static_cast<std::size_t>(b)]; ++j) {
        if (sight.seen(b, g, j)) continue;
        any = true;
        overwrite(vector_of(call, changed.k.view(), b, g, j, true), odd_value(random, call.q.dtype()));
        overwrite(vector_of(call, changed.v.view(), b, g, j, true), odd_value(random, call.q.dtype()));
      }
    for (std::int64_t h = 0; h < spec.heads(); ++h)
      for (std::int64_t i = 0; i < spec.rows[static_cast<std::size_t>(b)]; ++i) {
        if (sight.sees_any(b, h, i)) continue;
        any = true;
        overwrite(vector_of(call, changed.q.view(), b, h, i, false), odd_value(random, call.q.dtype()));
        overwrite(vector_of(call, changed.grad_out.view(), b, h, i, false), odd_value(random, call.q.dtype()));
      }
  }
  if (!any) return std::nullopt;
  changed.run();
  return compare("other forbidden values", changed, base);
}

// Another key and value where some rows see it and some do not: the latter, and keys that share no row with it, keep
// their bits.
Found check_one_key(const Prepared& prepared, const Contiguous& base) {
  const Spec& spec = prepared.spec;
  const Sight& sight = prepared.sight;
  const Call& call = base.call;
  Random random = stream(prepared.materials.what, 31);
  if (spec.batch() == 0 || spec.heads() == 0 || spec.k.size(2) == 0) return std::nullopt;
  for (int attempt = 0; attempt < 8; ++attempt) {
    const auto below = [&](std::int64_t end) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
    };
    const std::int64_t b = below(spec.batch()), g = below(spec.kv_heads()), j = below(spec.k.size(2));
    if (j >= spec.keys[static_cast<std::size_t>(b)]) continue;
    const bool hidden_from_some = sight.any_row(
        b, g, [&](std::int64_t h, std::int64_t i) { return !sight.sees(b, h, i, j) && sight.sees_any(b, h, i); });
    if (!hidden_from_some || !sight.seen(b, g, j)) continue;
    Contiguous changed(call, base.grad_out);
    overwrite(vector_of(call, changed.k.view(), b, g, j, true), odd_value(random, call.q.dtype()));
    overwrite(vector_of(call, changed.v.view(), b, g, j, true), odd_value(random, call.q.dtype()));
    changed.run();
    const std::string check_name = "a key that other rows see";
    Found found;
    sight.any_row(b, g, [&](std::int64_t h, std::int64_t i) {
      if (sight.sees(b, h, i, j)) return false;
      const auto row = [&](const Tensor& tensor) { return vector_of(call, tensor.view(), b, h, i, false); };
      std::vector<Pair> pairs{
          {"out", row(changed.results.out), row(base.results.out)},
          {"lse", lse_of(call, changed.results.lse, b, h, i), lse_of(call, base.results.lse, b, h, i)},
          {"dq", row(changed.gradients.dq), row(base.gradients.dq)}};
      if (base.results.weights) pairs.push_back({"weights", row(*changed.results.weights), row(*base.results.weights)});
      found = first_difference(check_name, pairs);
      if (found)
        found->text += " of row " + std::to_string(i) + " of head " + std::to_string(h) + ", item " +
                       std::to_string(b) + "; the key is " + std::to_string(j);
      return found.has_value();
    });
    for (std::int64_t other = 0; !found && other < spec.keys[static_cast<std::size_t>(b)]; ++other) {
      if (sight.any_row(b, g, [&](std::int64_t h, std::int64_t i) {
            return sight.sees(b, h, i, j) && sight.sees(b, h, i, other);
          }))
        continue;
      const auto key = [&](const Tensor& tensor) { return vector_of(call, tensor.view(), b, g, other, true); };
      found = first_difference(check_name, {{"dk", key(changed.gradients.dk), key(base.gradients.dk)},
                                            {"dv", key(changed.gradients.dv), key(base.gradients.dv)}});
      if (found)
        found->text +=
            " of key " + std::to_string(other) + ", item " + std::to_string(b) + "; the key is " + std::to_string(j);
    }
    return found;
  }
  return std::nullopt;
}

// False in a mask beside a bias, and -inf in that bias instead.
Found check_mask_as_bias(const Contiguous& base) {
  const Call& call = base.call;
  if (!call.options.mask) return std::nullopt;
  Dims sizes = call.weights_sizes();
  if (call.packing)
    sizes = {call.packing->batch(), call.q.size(1), call.packing->longest_q(), call.packing->longest_k()};
  const ConstTensorView mask = call.options.mask->expand(sizes);
  Tensor plain = call.options.bias ? copied_to(call.options.bias->expand(sizes), {}) : Tensor(sizes, DType::f32);
  Tensor forbidding = plain.clone();
  each_index(sizes, [&](const Dims& index) {
    if (get(mask, index) == 0) set(forbidding, index, -std::numeric_limits<double>::infinity());
  });
  Contiguous masked(call, base.grad_out), biased(call, base.grad_out);
  masked.call.options.bias = static_cast<const Tensor&>(plain).view();
  biased.call.options.bias = static_cast<const Tensor&>(forbidding).view();
  biased.call.options.mask.reset();
  masked.run();
  biased.run();
  return compare("-inf in a bias for false in a mask", biased, masked);
}

}  // namespace

Found check_bits(const Prepared& prepared, const Call& call, Outputs& outputs) {
  const bool on_cpu = call.options.engine != Engine::cuda;
  // The reference is one loop for every call, and slow.
  if (call.options.engine == Engine::reference && cost(prepared.materials.what) > 1e5) return std::nullopt;
  Contiguous base(call, prepared.materials.grad_out);
  base.run();
  constexpr int threads[] = {2, 3, 3, 5, 8};
  const int drawn = threads[prepared.materials.what.seed / 7 % std::size(threads)];
  if (Found found = check_again(base, on_cpu ? drawn : 1)) return found;
  if (on_cpu) {
    if (Found found = check_fewer_gradients(prepared, base)) return found;
    if (Found found = check_at_once(prepared, base)) return found;
    if (Found found = check_strides(outputs, base)) return found;
    if (Found found = check_fewer_outputs(base)) return found;
    if (Found found = check_paged(prepared, base.call, base.results)) return found;
  }
  if (on_cpu || call.options.batch_invariant)
    if (Found found = check_alone(prepared, base)) return found;
  if (Found found = check_hidden(prepared, base)) return found;
  if (Found found = check_one_key(prepared, base)) return found;
  return check_mask_as_bias(base);
}

}  // namespace headway::test::fuzz
