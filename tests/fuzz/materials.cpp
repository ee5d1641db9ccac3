#include "fuzz/materials.h"

#include <algorithm>
#include <cmath>

namespace headway::test::fuzz {
namespace {

std::int64_t up_to(Random& random, std::int64_t largest) {
  return std::uniform_int_distribution<std::int64_t>(0, std::max<std::int64_t>(largest, 0))(random);
}

double smallest_normal(DType type) { return type == DType::f64 ? 0x1p-1022 : type == DType::f16 ? 0x1p-14 : 0x1p-126; }

// A length of a sequence: often none, one or all of it.
std::int64_t some_length(Random& random, std::int64_t largest) {
  switch (up_to(random, 5)) {
    case 0: return 0;
    case 1: return std::min<std::int64_t>(largest, 1);
    case 2: return largest;
    default: return up_to(random, largest);
  }
}

// Whether a pattern leaves the element at this place of a matrix open.
bool open(Pattern pattern, std::int64_t i, std::int64_t j, std::uint64_t salt, Random& random) {
  const auto scattered = [&](std::int64_t number, std::uint64_t out_of) {
    return (static_cast<std::uint64_t>(number) * 2654435761u + salt) / 7 % out_of != 0;
  };
  switch (pattern) {
    case Pattern::none:
    case Pattern::full: return true;
    case Pattern::random: return up_to(random, 9) < 7;
    case Pattern::sparse: return up_to(random, 19) == 0;
    case Pattern::rows: return scattered(i, 3);
    case Pattern::columns: return scattered(j, 3);
    case Pattern::tiles: return scattered(i / 16 * 1024 + j / 64, 2);
    case Pattern::one_key:
      return (static_cast<std::uint64_t>(i) * 7919 + salt) % 97 == static_cast<std::uint64_t>(j) % 97;
    case Pattern::empty: return false;
  }
  return true;
}

// Sizes of a mask or bias for the form of the call: full along `axes`, 1 along the others.
Dims option_sizes(const Case& one, const std::string& axes, const Dims& full) {
  Dims sizes;
  for (int axis = 0; axis < 4; ++axis) {
    if (one.form == Form::sd && axis < 2) continue;
    if (one.form == Form::bsd && axis == 1) continue;
    sizes.push_back(axes.find("bhij"[axis]) == std::string::npos ? 1 : full[axis]);
  }
  if (!one.trimmed) return sizes;
  Dims trimmed;
  for (std::int64_t size : sizes)
    if (size != 1 || !trimmed.empty()) trimmed.push_back(size);
  return trimmed.empty() ? Dims{1} : trimmed;
}

Dims full_sizes(const Case& one, const Dims& full) {
  Case whole = one;
  whole.trimmed = false;
  return option_sizes(whole, "bhij", full);
}

void fill_pattern(TensorView view, Pattern pattern, std::uint64_t salt, Random& random, double forbidden) {
  const int rank = view.rank();
  each_index(view.sizes(), [&](const Dims& index) {
    const std::int64_t i = rank >= 2 ? index[rank - 2] : 0, j = index[rank - 1];
    if (!open(pattern, i, j, salt, random)) set(view, index, forbidden);
  });
}

DType dtype_of(FloatType type) {
  constexpr DType types[] = {DType::f32, DType::f32, DType::f64, DType::bf16, DType::f16};
  return types[static_cast<std::size_t>(type)];
}

Strided lengths(const Dims& sizes, bool narrow, const std::vector<std::int64_t>& most, Random random) {
  Strided result(sizes, narrow ? DType::i32 : DType::i64, narrow ? Layout::reversed : Layout::gaps);
  each_index(sizes, [&](const Dims& index) {
    set(result.view(), index, static_cast<double>(some_length(random, most[static_cast<std::size_t>(index[0])])));
  });
  return result;
}

// ---- Spans ----

struct Span {
  std::int64_t begin, end;
};

// A span of a row, or of all rows of an entry whose last row is `row`: spans of item, head and row are one pattern.
Span some_span(Spans kind, std::int64_t n, std::int64_t row, std::int64_t rows, std::int64_t keys, std::uint64_t salt,
               Random& random) {
  const auto cut = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t from = std::clamp<std::int64_t>(begin, 0, keys);
    return Span{from, std::clamp<std::int64_t>(end, from, keys)};
  };
  const auto fixed = static_cast<std::int64_t>(salt % 61);
  const std::int64_t position = row + keys - rows;
  switch (kind) {
    case Spans::none: return cut(0, keys);
    case Spans::random: {
      const std::int64_t begin = up_to(random, keys);
      return cut(begin, begin + up_to(random, std::max<std::int64_t>(keys / 4, 3)));
    }
    case Spans::prefix: return n % 2 == 0 ? cut(0, fixed) : cut(0, position + 1);
    case Spans::first: return n % 2 == 0 ? cut(0, 1 + fixed % 5) : cut(position - fixed, position + 1);
    case Spans::documents: {  // of `length` keys; a later span is the document before the last one again
      const std::int64_t length = 3 + fixed, document = std::max<std::int64_t>(position, 0) / length - 2 * n;
      return document < 0 ? cut(0, 0) : cut(document * length, (document + 1) * length);
    }
    case Spans::blocks: {
      const std::int64_t size = fixed % 2 == 0 ? 16 : 64, block = up_to(random, keys / size);
      return cut(block * size, (block + 1) * size);
    }
    case Spans::hostile:
      switch (up_to(random, 5)) {
        case 0: return cut(0, 0);
        case 1: return cut(keys, keys);
        case 2: return cut(0, keys);
        case 3: return cut(fixed, fixed + 1);
        default: {
          const std::int64_t key = up_to(random, keys);
          return cut(key, key + up_to(random, 1));
        }
      }
  }
  return cut(0, 0);
}

// Packed calls have an entry a row of the pack, others one for every span_rows rows of an item.
void make_spans(const Case& one, const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& keys,
                OptionTensors& tensors, AttentionOptions& options) {
  const bool pack = one.form == Form::packed;
  const bool by_item = !pack && one.form != Form::sd && one.span_axes.find('b') != std::string::npos;
  const bool by_head = one.form != Form::sd && one.form != Form::bsd && one.span_axes.find('h') != std::string::npos;
  Dims sizes;
  if (one.form != Form::sd) sizes.push_back(by_item ? static_cast<std::int64_t>(rows.size()) : 1);
  if (one.form != Form::sd && one.form != Form::bsd) sizes.push_back(by_head ? one.h : 1);
  std::vector<Span> lengths;  // of each entry: its last row inside the item, and the item
  for (std::int64_t b = 0; b < (pack ? static_cast<std::int64_t>(rows.size()) : 1); ++b) {
    const std::int64_t count = pack ? rows[static_cast<std::size_t>(b)] : one.sq;
    for (std::int64_t i = 0; i < count; i += one.span_rows)
      lengths.push_back({std::min(i + one.span_rows, count) - 1, b});
  }
  sizes.push_back(static_cast<std::int64_t>(lengths.size()));
  sizes.push_back(one.span_count);
  sizes.push_back(2);
  Random random = stream(one, 17);
  tensors.spans = Strided(sizes, one.narrow_spans ? DType::i32 : DType::i64,
                          one.narrow_spans    ? Layout::gaps
                          : one.seed % 2 == 0 ? Layout::reversed
                                              : Layout::contiguous);
  Dims entries = sizes;
  entries[entries.size() - 1] = 1;
  each_index(entries, [&](const Dims& index) {
    const Span& at = lengths[static_cast<std::size_t>(index[index.size() - 3])];
    const auto item = static_cast<std::size_t>(at.end);
    const std::int64_t all_keys = pack ? keys[item] : one.sk, all_rows = pack ? rows[item] : one.sq;
    const Span span = some_span(one.spans, index[index.size() - 2], at.begin, all_rows, all_keys, one.seed / 3, random);
    Dims end = index;
    end[end.size() - 1] = 1;
    set(tensors.spans.view(), index, static_cast<double>(span.begin));
    set(tensors.spans.view(), end, static_cast<double>(span.end));
  });
  options.spans = tensors.spans.view();
  options.span_rows = one.span_rows;
}

}  // namespace

double largest_finite(DType type) {
  switch (type) {
    case DType::f64: return std::numeric_limits<double>::max();
    case DType::f16: return 65504;
    case DType::bf16: return 0x1.FEp127;
    default: return static_cast<double>(std::numeric_limits<float>::max());
  }
}

double value_of(Odd odd, DType type) {
  switch (odd) {
    case Odd::nan: return std::numeric_limits<double>::quiet_NaN();
    case Odd::inf: return std::numeric_limits<double>::infinity();
    case Odd::minus_inf: return -std::numeric_limits<double>::infinity();
    case Odd::tiny: return type == DType::f16 ? 1e-7 : 1e-20;
    case Odd::large: return type == DType::f16 ? 3e4 : 1e7;
  }
  return 0;
}

void fill(TensorView view, Numbers numbers, double size, Random& random) {
  std::normal_distribution<double> normal_number(0.0, 1.0);
  const std::int64_t width = view.rank() == 0 ? 1 : view.sizes().back();
  const std::int64_t channel = up_to(random, width - 1);
  std::vector<double> row(static_cast<std::size_t>(width));
  for (double& one : row) one = normal_number(random) * size;
  const auto denormal = [&] { return std::ldexp(smallest_normal(view.dtype()), -static_cast<int>(up_to(random, 5))); };
  each_index(view.sizes(), [&](const Dims& index) {
    const std::int64_t d = index[view.rank() - 1];
    const double usual = normal_number(random) * size;
    double value = usual;
    switch (numbers) {
      case Numbers::normal: break;
      case Numbers::constant: value = size; break;
      case Numbers::equal: value = row[static_cast<std::size_t>(d)]; break;
      case Numbers::channel: value = d == channel ? (usual < 0 ? -size : size) + usual * 0.1 : usual * 1e-3; break;
      case Numbers::integers: value = static_cast<double>(up_to(random, 4) - 2) * size; break;
      case Numbers::apart: value = index[view.rank() - 2] % 7 == 3 ? 64 * usual : usual; break;
      case Numbers::wide: value = std::ldexp(usual, -static_cast<int>(up_to(random, 30))); break;
      case Numbers::signed_zeros: value = std::copysign(up_to(random, 7) == 0 ? usual : 0.0, usual); break;
      case Numbers::denormal: value = std::copysign(denormal(), usual); break;
    }
    set(view, index, std::clamp(value, -largest_finite(view.dtype()), largest_finite(view.dtype())));
  });
}

void make_options(const Case& one, const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& keys,
                  OptionTensors& tensors, AttentionOptions& options) {
  const std::int64_t batch = static_cast<std::int64_t>(rows.size());
  const Dims full{batch, one.h, rows.empty() ? one.sq : *std::max_element(rows.begin(), rows.end()),
                  keys.empty() ? one.sk : *std::max_element(keys.begin(), keys.end())};
  const auto view_of = [&](Strided& tensor) {
    return one.expanded ? tensor.view().expand(full_sizes(one, full)) : tensor.view();
  };
  if (one.mask != Pattern::none) {
    Random random = stream(one, 11);
    tensors.mask = Strided(option_sizes(one, one.mask_axes, full), DType::b8, one.option_layout);
    each_index(tensors.mask.view().sizes(), [&](const Dims& index) { set(tensors.mask.view(), index, 1); });
    fill_pattern(tensors.mask.view(), one.mask, one.seed, random, 0);
    options.mask = view_of(tensors.mask);
  }
  if (one.bias != Pattern::none) {
    Random random = stream(one, 12);
    tensors.bias =
        normal_strided(option_sizes(one, one.bias_axes, full), one.bias_type, one.option_layout, random, one.bias_size);
    fill_pattern(tensors.bias.view(), one.bias, one.seed + 1, random, -std::numeric_limits<double>::infinity());
    options.bias = view_of(tensors.bias);
  }
  options.causal = one.causal;
  if (one.left >= 0 || one.right >= 0) {
    options.window = Window{};
    if (one.left >= 0) options.window->left = one.left;
    if (one.right >= 0) options.window->right = one.right;
  }
  if (one.valid != Lengths::none) {
    const bool per_row = one.valid == Lengths::row || one.valid == Lengths::row32;
    const bool narrow = one.valid == Lengths::item32 || one.valid == Lengths::row32;
    tensors.valid_lens = lengths(per_row ? Dims{batch, full[2]} : Dims{batch}, narrow, keys, stream(one, 13));
    options.valid_lens = tensors.valid_lens.view();
  }
  if (one.queries != Lengths::none) {
    tensors.query_lens = lengths({batch}, one.queries == Lengths::item32, rows, stream(one, 14));
    options.query_lens = tensors.query_lens.view();
  }
  if (one.spans != Spans::none) make_spans(one, rows, keys, tensors, options);
  if (!std::isnan(one.scale)) options.scale = one.scale;
  if (one.softcap > 0) options.softcap = one.softcap;
  if (one.alibi != FloatType::none) {
    Random random = stream(one, 15);
    tensors.slopes = normal_strided({one.h}, dtype_of(one.alibi), Layout::gaps, random, one.alibi_size);
    options.alibi_slopes = tensors.slopes.view();
  }
  if (one.sinks != FloatType::none) {
    Random random = stream(one, 16);
    tensors.sinks = normal_strided({one.h}, dtype_of(one.sinks), Layout::reversed, random, one.sinks_size);
    options.sinks = tensors.sinks.view();
  }
  options.dropout = one.dropout;
  if (one.dropout > 0) options.seed = one.seed ^ 0x5bd1e995;
}

Materials::Materials(const Case& one) : what(legal(one)) {
  if (what.form == Form::packed) make_packing();
  make_tensors();
  std::vector<std::int64_t> rows(static_cast<std::size_t>(what.b), what.sq), keys(rows.size(), what.sk);
  for (std::size_t b = 0; call.packing && b < rows.size(); ++b) {
    rows[b] = call.packing->starts_q[b + 1] - call.packing->starts_q[b];
    keys[b] = call.packing->starts_k[b + 1] - call.packing->starts_k[b];
  }
  make_options(what, rows, keys, options_, call.options);
  plant();
}

// The first sequence has the case's own lengths, the others at most that.
void Materials::make_packing() {
  Random random = stream(what, 10);
  Packing packing{{0, what.sq}, {0, what.sk}};
  for (std::int64_t b = 1; b < what.b; ++b) {
    const std::int64_t queries = some_length(random, what.sq), keys = some_length(random, what.sk);
    packing.starts_q.push_back(packing.starts_q.back() + queries);
    packing.starts_k.push_back(packing.starts_k.back() + (what.sq == what.sk ? queries : keys));
  }
  call.packing = packing;
}

void Materials::make_tensors() {
  const bool pack = what.form == Form::packed;
  const auto sizes = [&](std::int64_t heads, std::int64_t length, std::int64_t width) {
    if (pack) return Dims{length, heads, width};
    if (what.form == Form::sd) return Dims{length, width};
    if (what.form == Form::bsd) return Dims{what.b, length, width};
    return Dims{what.b, heads, length, width};
  };
  const std::int64_t total_q = pack ? call.packing->starts_q.back() : what.sq;
  const std::int64_t total_k = pack ? call.packing->starts_k.back() : what.sk;
  if (what.sharing == Sharing::qkv) {
    // [B,S,H+2Hkv,D], or without B where sequences are packed.
    const std::int64_t heads = what.h + 2 * what.hkv;
    k_ = Strided(pack ? Dims{total_k, heads, what.d} : Dims{what.b, total_k, heads, what.d}, what.type, what.k_layout);
    const int axis = pack ? 1 : 2;
    const auto part = [&](std::int64_t begin, std::int64_t end) {
      const TensorView slice = k_.view().slice(axis, begin, end);
      return pack ? slice : slice.transpose(1, 2);
    };
    call.q = part(0, what.h);
    call.k = part(what.h, what.h + what.hkv);
    call.v = part(what.h + what.hkv, heads);
  } else {
    k_ = Strided(sizes(what.hkv, total_k, what.d), what.type, what.k_layout);
    call.k = call.v = call.q = k_.view();
    if (what.sharing != Sharing::all) {
      q_ = Strided(sizes(what.h, total_q, what.d), what.type, what.q_layout);
      call.q = q_.view();
    }
    if (what.sharing == Sharing::none) {
      v_ = Strided(sizes(what.hkv, total_k, what.dv), what.type, what.v_layout);
      call.v = v_.view();
    }
    if (what.sharing == Sharing::columns) call.v = k_.view().slice(k_.view().rank() - 1, 0, what.dv);
  }
  const auto writable = [](ConstTensorView view) {
    return TensorView(const_cast<void*>(view.data()), view.dtype(), view.sizes(), view.strides());
  };
  Random q_random = stream(what, 1), k_random = stream(what, 2), v_random = stream(what, 3), random = stream(what, 4);
  fill(writable(call.v), what.v, what.v_size, v_random);
  fill(writable(call.q), what.q, what.q_size, q_random);
  fill(writable(call.k), what.k, what.k_size, k_random);
  grad_out_ = Strided(call.out_sizes(), what.type, what.grad_layout);
  fill(grad_out_.view(), what.grad, what.grad_size, random);
  grad_out = grad_out_.view();
}

void Materials::plant() {
  if (what.plants.empty()) return;
  Random random = stream(what, 20);
  const Spec spec = call.spec();
  for (const Plant& one : what.plants) plant_one(one, spec, random);
}

// Looks for a place of that kind a few times, and leaves it where there seems to be none.
void Materials::plant_one(const Plant& plant, const Spec& spec, Random& random) {
  if (spec.q.elements() == 0 && spec.v.elements() == 0) return;
  const std::int64_t group = spec.heads() / spec.kv_heads();
  if (spec.batch() == 0 || spec.heads() == 0 || spec.q.size(2) == 0 || spec.k.size(2) == 0) return;
  const double value = value_of(plant.odd, what.type);
  for (int attempt = 0; attempt < 20; ++attempt) {
    const std::int64_t b = up_to(random, spec.batch() - 1), h = up_to(random, spec.heads() - 1), g = h / group;
    const std::int64_t i = up_to(random, spec.q.size(2) - 1), j = up_to(random, spec.k.size(2) - 1);
    if (i >= spec.rows[static_cast<std::size_t>(b)] || j >= spec.keys[static_cast<std::size_t>(b)]) continue;
    bool seen = false, row_sees = false;  // the key by some row of its group; some key by the row
    for (std::int64_t head = g * group; head < (g + 1) * group; ++head)
      for (std::int64_t row = 0; row < spec.q.size(2); ++row) seen = seen || allowed(spec, b, head, row, j);
    for (std::int64_t key = 0; key < spec.k.size(2); ++key) row_sees = row_sees || allowed(spec, b, h, i, key);
    const bool pair = allowed(spec, b, h, i, j);
    const auto element = [&](ConstTensorView view, std::int64_t head, std::int64_t row, bool of_keys) {
      const std::int64_t d = up_to(random, view.sizes().back() - 1);
      Dims index{b, head, row, d};
      if (what.form == Form::bsd) index = {b, row, d};
      if (what.form == Form::sd) index = {row, d};
      if (what.form == Form::packed) {
        const auto& starts = of_keys ? call.packing->starts_k : call.packing->starts_q;
        index = {starts[static_cast<std::size_t>(b)] + row, head, d};
      }
      if (view.sizes().back() == 0) return false;
      set(TensorView(const_cast<void*>(view.data()), view.dtype(), view.sizes(), view.strides()), index, value);
      return true;
    };
    bool done = false;
    switch (plant.place) {
      case Place::query: done = element(call.q, h, i, false); break;
      case Place::hidden_key: done = !seen && element(call.k, g, j, true); break;
      case Place::hidden_value: done = !seen && element(call.v, g, j, true); break;
      case Place::key: done = seen && element(call.k, g, j, true); break;
      case Place::value: done = seen && element(call.v, g, j, true); break;
      case Place::grad: done = row_sees && element(grad_out, h, i, false); break;
      case Place::hidden_grad: done = !row_sees && element(grad_out, h, i, false); break;
      case Place::sink: {
        if (!call.options.sinks) return;
        const ConstTensorView sinks = *call.options.sinks;
        set(TensorView(const_cast<void*>(sinks.data()), sinks.dtype(), sinks.sizes(), sinks.strides()), {h},
            value_of(plant.odd, sinks.dtype()));
        done = true;
        break;
      }
      case Place::bias:
      case Place::hidden_bias: {
        if (!call.options.bias || plant.odd == Odd::minus_inf) return;
        if (pair != (plant.place == Place::bias)) continue;
        const ConstTensorView bias = *call.options.bias;
        const Dims at{b, h, i, j};
        Dims index = bias.sizes();
        for (int axis = 0; axis < bias.rank(); ++axis) {
          int of_four = 4 - bias.rank() + axis;
          if (what.form == Form::bsd && bias.rank() == 3 && axis == 0) of_four = 0;
          index[axis] = bias.size(axis) == 1 ? 0 : at[of_four];
        }
        if (get(bias, index) == -std::numeric_limits<double>::infinity()) continue;
        set(TensorView(const_cast<void*>(bias.data()), bias.dtype(), bias.sizes(), bias.strides()), index,
            value_of(plant.odd, bias.dtype()));
        done = true;
        break;
      }
    }
    if (done) {
      const bool infinite = plant.odd == Odd::inf || plant.odd == Odd::minus_inf;
      has_infinities = has_infinities || (infinite && (!is_hidden(plant.place) || shares_elements(what)));
      return;
    }
  }
}

}  // namespace headway::test::fuzz
