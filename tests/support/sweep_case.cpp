#include "support/sweep_case.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>

namespace headway::test {
namespace {

const std::vector<std::string> input_layouts{"contiguous", "heads inside", "gaps",
                                             "reversed",   "misaligned",   "repeated"};
const std::vector<std::string> output_layouts{"contiguous", "heads inside", "gaps", "reversed", "misaligned"};

struct Lengths {
  std::int64_t queries, keys;
};
const std::map<std::string, Lengths> lengths{
    {"square", {16, 16}},   {"few queries", {5, 23}}, {"few keys", {19, 7}}, {"odd", {13, 33}},
    {"one query", {1, 17}}, {"one key", {9, 1}},      {"one", {1, 1}},       {"long", {67, 131}},
    {"longer", {66, 261}},  {"many keys", {2, 540}},
};

struct Widths {
  std::int64_t head, value;
};
const std::map<std::string, Widths> widths{
    {"8", {8, 8}},   {"64", {64, 64}},  {"16/5", {16, 5}},   {"5/12", {5, 12}},
    {"1/1", {1, 1}}, {"80/3", {80, 3}}, {"128", {128, 128}},
};

struct Heads {
  std::int64_t query, key;
};
const std::map<std::string, Heads> head_counts{
    {"1", {1, 1}}, {"2/2", {2, 2}}, {"4/2", {4, 2}}, {"3/1", {3, 1}}, {"6/2", {6, 2}}};

template <class Map>
std::vector<std::string> keys_of(const Map& map) {
  std::vector<std::string> result;
  for (const auto& entry : map) result.push_back(entry.first);
  return result;
}

int factor_number(const std::string& name) {
  const auto& factors = sweep_factors();
  for (std::size_t n = 0; n < factors.size(); ++n)
    if (factors[n].name == name) return static_cast<int>(n);
  throw std::logic_error("no factor " + name);
}

DType type_named(const std::string& type) {
  for (DType one : {DType::f32, DType::f64, DType::bf16, DType::f16})
    if (type == name(one)) return one;
  throw std::logic_error("no type " + type);
}

}  // namespace

const std::vector<Factor>& sweep_factors() {
  static const std::vector<Factor> factors{
      {"type", {"f32", "f64", "bf16", "f16"}},
      {"form", {"rank 4", "rank 3", "rank 2", "packed"}},
      {"batch", {"1", "3"}},
      {"heads", keys_of(head_counts)},
      {"lengths", keys_of(lengths)},
      {"widths", keys_of(widths)},
      {"mask", {"none", "full", "Sq,Sk", "B,1,1,Sk", "1,H,Sq,1", "empty rows"}, true},
      {"bias", {"none", "full", "1,H,Sq,Sk f32", "Sq,1 f64", "B,1,1,Sk -inf", "Sk bf16", "expanded"}, true},
      {"causal", {"none", "square", "top_left", "bottom_right"}, true},
      {"window", {"none", "3,0", "2,4", "1,none", "none,2", "0,0"}, true},
      {"valid_lens", {"none", "B i64", "B i32", "B,Sq", "B with 0"}, true},
      {"query_lens", {"none", "B i64", "B i32 with 0"}, true},
      {"scale", {"default", "0.3", "-0.7", "0"}},
      {"softcap", {"none", "5", "0.7"}},
      {"alibi", {"none", "f32", "f64", "f16"}},
      {"sinks", {"none", "f32", "f64", "bf16"}},
      {"dropout", {"0", "0.3", "0.9", "1"}, true},
      {"query layout", input_layouts},
      {"key layout", input_layouts},
      {"value layout", input_layouts},
      {"out layout", output_layouts},
      {"lse", {"no", "yes"}},
      {"weights", {"no", "yes"}},
      {"gradients", {"all", "dq", "dk dv", "dbias dsinks"}},
  };
  return factors;
}

bool sweep_compatible(int factor_a, int level_a, int factor_b, int level_b) {
  const auto is = [&](const char* factor, const char* level) {
    const int number = factor_number(factor);
    const auto& names = sweep_factors()[static_cast<std::size_t>(number)].levels;
    return (factor_a == number && names[static_cast<std::size_t>(level_a)] == level) ||
           (factor_b == number && names[static_cast<std::size_t>(level_b)] == level);
  };
  const auto about = [&](const char* factor) {
    return factor_a == factor_number(factor) || factor_b == factor_number(factor);
  };
  const bool one_head = is("form", "rank 3") || is("form", "rank 2");
  if (one_head && about("heads") && !is("heads", "1")) return false;
  if (is("form", "rank 2") && is("batch", "3")) return false;
  if (is("form", "packed") && is("weights", "yes")) return false;
  // Nothing would be left; the edge cases have that.
  const bool empty_item = is("valid_lens", "B with 0") || is("query_lens", "B i32 with 0");
  if (empty_item && (is("batch", "1") || is("form", "rank 2"))) return false;
  if (is("causal", "square") && about("lengths")) return is("lengths", "square") || is("lengths", "one");
  return true;
}

struct SweepCase::Shape {
  std::int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
};

SweepCase::SweepCase(const Assignment& levels, std::uint64_t seed)
    : description(describe(levels, sweep_factors())),
      levels_(levels),
      random_(seed),
      type_(type_named(level_name("type"))) {
  const Heads heads = head_counts.at(level_name("heads"));
  const Lengths length = lengths.at(level_name("lengths"));
  const Widths width = widths.at(level_name("widths"));
  const Shape shape{
      std::stoll(level_name("batch")), heads.query, heads.key, length.queries, length.keys, width.head, width.value};
  if (level_name("form") == "packed") make_packing(shape);
  make_tensors(shape);
  make_mask(shape);
  make_bias(shape);
  make_key_ranges(shape);
  make_modifiers(shape);
}

int SweepCase::level(const char* factor) const { return levels_[static_cast<std::size_t>(factor_number(factor))]; }

std::string SweepCase::level_name(const char* factor) const {
  return sweep_factors()[static_cast<std::size_t>(factor_number(factor))]
      .levels[static_cast<std::size_t>(level(factor))];
}

Layout SweepCase::layout(const char* factor) const { return static_cast<Layout>(level(factor)); }

std::int64_t SweepCase::random_up_to(std::int64_t largest) {
  return std::uniform_int_distribution<std::int64_t>(0, largest)(random_);
}

// A length for item b, which is not 0 for the first.
std::int64_t SweepCase::random_length(std::int64_t largest, std::int64_t b) {
  return b == 0 ? 1 + random_up_to(largest - 1) : random_up_to(largest);
}

// The first sequence has the class's own lengths, the others at most that.
void SweepCase::make_packing(const Shape& shape) {
  Packing packing{{0, shape.queries}, {0, shape.keys}};
  for (std::int64_t b = 1; b < shape.batch; ++b) {
    const std::int64_t queries = random_up_to(shape.queries);
    packing.starts_q.push_back(packing.starts_q.back() + queries);
    packing.starts_k.push_back(packing.starts_k.back() +
                               (shape.queries == shape.keys ? queries : random_up_to(shape.keys)));
  }
  call.packing = packing;
}

void SweepCase::make_tensors(const Shape& shape) {
  const std::string form = level_name("form");
  const auto sizes = [&](std::int64_t heads, std::int64_t length, std::int64_t total, std::int64_t width) {
    if (form == "packed") return Dims{total, heads, width};
    if (form == "rank 2") return Dims{length, width};
    if (form == "rank 3") return Dims{shape.batch, length, width};
    return Dims{shape.batch, heads, length, width};
  };
  const std::int64_t total_q = call.packing ? call.packing->starts_q.back() : 0;
  const std::int64_t total_k = call.packing ? call.packing->starts_k.back() : 0;
  q_ = normal_strided(sizes(shape.heads, shape.queries, total_q, shape.head_dim), type_, layout("query layout"),
                      random_);
  k_ = normal_strided(sizes(shape.kv_heads, shape.keys, total_k, shape.head_dim), type_, layout("key layout"), random_);
  v_ = normal_strided(sizes(shape.kv_heads, shape.keys, total_k, shape.value_dim), type_, layout("value layout"),
                      random_);
  call.q = q_.view();
  call.k = k_.view();
  call.v = v_.view();
  grad_out = normal_strided(call.out_sizes(), type_, layout("value layout"), random_);
}

void SweepCase::make_mask(const Shape& shape) {
  const std::string kind = level_name("mask");
  if (kind == "none") return;
  const bool rank_4 = level_name("form") == "rank 4" || call.packing;
  const std::int64_t b = shape.batch, h = shape.heads, i = shape.queries, j = shape.keys;
  Dims sizes = rank_4 ? Dims{b, h, i, j} : level_name("form") == "rank 3" ? Dims{b, i, j} : Dims{i, j};
  if (kind == "Sq,Sk") sizes = {i, j};
  if (kind == "B,1,1,Sk")
    sizes = rank_4 ? Dims{b, 1, 1, j} : level_name("form") == "rank 3" ? Dims{b, 1, j} : Dims{1, j};
  if (kind == "1,H,Sq,1") sizes = rank_4 ? Dims{1, h, i, 1} : Dims{i, 1};
  mask_ = Strided(sizes, DType::b8, layout("key layout") == Layout::repeated ? Layout::gaps : layout("key layout"));
  fill_bool(mask_.view(), random_, 0.7);
  if (kind == "empty rows") {
    const TensorView view = mask_.view();
    for (std::int64_t n = 0; n < view.elements(); ++n) {
      const Dims index = index_of(n, sizes);
      if (index[sizes.size() - 2] % 3 == 1) set(view, index, 0);
    }
  }
  call.options.mask = mask_.view();
}

void SweepCase::make_bias(const Shape& shape) {
  const std::string kind = level_name("bias");
  if (kind == "none") return;
  const bool rank_4 = level_name("form") == "rank 4" || call.packing;
  const std::int64_t b = shape.batch, h = shape.heads, i = shape.queries, j = shape.keys;
  const Dims full = rank_4 ? Dims{b, h, i, j} : level_name("form") == "rank 3" ? Dims{b, i, j} : Dims{i, j};
  Dims sizes = full;
  DType type = type_;
  if (kind == "1,H,Sq,Sk f32") {
    sizes = rank_4 ? Dims{1, h, i, j} : Dims{i, j};
    type = DType::f32;
  } else if (kind == "Sq,1 f64") {
    sizes = {i, 1};
    type = DType::f64;
  } else if (kind == "B,1,1,Sk -inf") {
    sizes = rank_4 ? Dims{b, 1, 1, j} : level_name("form") == "rank 3" ? Dims{b, 1, j} : Dims{1, j};
  } else if (kind == "Sk bf16" || kind == "expanded") {
    sizes = {j};
    if (kind == "Sk bf16") type = DType::bf16;
  }
  const Layout own = layout("query layout") == Layout::repeated ? Layout::reversed : layout("query layout");
  bias_ = normal_strided(sizes, type, own, random_);
  if (kind == "B,1,1,Sk -inf") {
    const TensorView view = bias_.view();
    for (std::int64_t n = 0; n < view.elements(); ++n)
      if (random_up_to(3) == 0) set(view, index_of(n, sizes), -std::numeric_limits<double>::infinity());
  }
  call.options.bias = kind == "expanded" ? bias_.view().expand(full) : bias_.view();
}

void SweepCase::make_key_ranges(const Shape& shape) {
  call.options.causal = static_cast<Causal>(level("causal"));
  const std::map<std::string, Window> windows{
      {"3,0", {3, 0}}, {"2,4", {2, 4}}, {"1,none", {1, {}}}, {"none,2", {{}, 2}}, {"0,0", {0, 0}}};
  if (const auto found = windows.find(level_name("window")); found != windows.end())
    call.options.window = found->second;

  const auto keys_of_item = [&](std::int64_t b) {
    const auto at = static_cast<std::size_t>(b);
    return call.packing ? call.packing->starts_k[at + 1] - call.packing->starts_k[at] : shape.keys;
  };
  const auto rows_of_item = [&](std::int64_t b) {
    const auto at = static_cast<std::size_t>(b);
    return call.packing ? call.packing->starts_q[at + 1] - call.packing->starts_q[at] : shape.queries;
  };
  const std::string valid = level_name("valid_lens");
  if (valid != "none") {
    const Dims sizes = valid == "B,Sq" ? Dims{shape.batch, shape.queries} : Dims{shape.batch};
    valid_lens_ = Strided(sizes, valid == "B i32" ? DType::i32 : DType::i64, Layout::gaps);
    const TensorView view = valid_lens_.view();
    for (std::int64_t n = 0; n < view.elements(); ++n) {
      const Dims index = index_of(n, sizes);
      set(view, index, static_cast<double>(random_length(keys_of_item(index[0]), index[0])));
    }
    if (valid == "B with 0") set(view, {shape.batch - 1}, 0);
    call.options.valid_lens = view;
  }
  const std::string queries = level_name("query_lens");
  if (queries != "none") {
    query_lens_ = Strided({shape.batch}, queries == "B i64" ? DType::i64 : DType::i32, Layout::reversed);
    for (std::int64_t b = 0; b < shape.batch; ++b)
      set(query_lens_.view(), {b}, static_cast<double>(random_length(rows_of_item(b), b)));
    if (queries == "B i32 with 0") set(query_lens_.view(), {shape.batch - 1}, 0);
    call.options.query_lens = query_lens_.view();
  }
}

void SweepCase::make_modifiers(const Shape& shape) {
  AttentionOptions& options = call.options;
  if (level_name("scale") != "default") options.scale = std::stod(level_name("scale"));
  if (level_name("softcap") != "none") options.softcap = std::stod(level_name("softcap"));
  if (level_name("alibi") != "none") {
    slopes_ = normal_strided({shape.heads}, type_named(level_name("alibi")), Layout::gaps, random_, 0.2);
    options.alibi_slopes = slopes_.view();
  }
  if (level_name("sinks") != "none") {
    sinks_ = normal_strided({shape.heads}, type_named(level_name("sinks")), Layout::reversed, random_, 1.5);
    options.sinks = sinks_.view();
  }
  options.dropout = std::stod(level_name("dropout"));
  if (options.dropout > 0) options.seed = random_();
}

bool SweepCase::live() const {
  if (call.options.dropout == 1) return false;
  const Lengths length = lengths.at(level_name("lengths"));
  const bool one_at_most = length.keys == 1 || level_name("window") == "0,0" ||
                           (length.queries == 1 && call.options.causal == Causal::top_left);
  const Spec spec = call.spec();
  for (std::int64_t b = 0; b < spec.batch(); ++b)
    for (std::int64_t h = 0; h < spec.heads(); ++h)
      for (std::int64_t i = 0; i < spec.q.size(2); ++i) {
        int keys = 0;
        for (std::int64_t j = 0; j < spec.k.size(2); ++j) keys += allowed(spec, b, h, i, j);
        if (keys >= (one_at_most ? 1 : 2)) return true;
      }
  return false;
}

Strided SweepCase::output(const Dims& sizes, DType dtype) const { return Strided(sizes, dtype, layout("out layout")); }

void SweepCase::check_forward() {
  Strided out = output(call.out_sizes(), type_);
  Strided lse = output(call.lse_sizes(), call.lse_type());
  Strided weights = output(call.packing ? Dims{0} : call.weights_sizes(), type_);
  AttentionOutputs outputs;
  if (level_name("lse") == "yes") outputs.lse = lse.view();
  if (level_name("weights") == "yes") outputs.weights = weights.view();
  call.forward(out.view(), outputs);
  expect_forward(call, out.view(), outputs);
  EXPECT_TRUE(out.surroundings_intact() && lse.surroundings_intact() && weights.surroundings_intact());
}

void SweepCase::check_backward() {
  const Results results = call.run();
  const std::string wanted = level_name("gradients");
  const auto wants = [&](const char* one) { return wanted == "all" || wanted.find(one) != std::string::npos; };
  Strided dq = output(call.q.sizes(), type_), dk = output(call.k.sizes(), type_), dv = output(call.v.sizes(), type_);
  Strided dbias, dsinks;
  AttentionGradients gradients;
  if (wants("dq")) gradients.dq = dq.view();
  if (wants("dk")) gradients.dk = dk.view();
  if (wants("dv")) gradients.dv = dv.view();
  if (call.options.bias && wants("dbias")) {
    dbias = output(call.options.bias->sizes(), call.options.bias->dtype());
    gradients.dbias = dbias.view();
  }
  if (call.options.sinks && wants("dsinks")) {
    dsinks = output(call.options.sinks->sizes(), DType::f32);
    gradients.dsinks = dsinks.view();
  }
  call.backward(grad_out.view(), results.out, results.lse, gradients);
  expect_backward(call, grad_out.view(), gradients);
  for (const Strided* one : {&dq, &dk, &dv, &dbias, &dsinks}) EXPECT_TRUE(one->surroundings_intact());
}

}  // namespace headway::test
