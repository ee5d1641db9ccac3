// Cases as text, and what makes a case legal.
#include "fuzz/case.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <stdexcept>

namespace headway::test::fuzz {
namespace {

// ---- Words for every enumeration, in the order of its values ----

using Words = std::vector<std::string>;

template <class Enum>
const Words& words();

#define HEADWAY_FUZZ_WORDS(Enum, ...)     \
  template <>                             \
  const Words& words<Enum>() {            \
    static const Words list{__VA_ARGS__}; \
    return list;                          \
  }
HEADWAY_FUZZ_WORDS(Subject, "attention", "layer", "cache")
HEADWAY_FUZZ_WORDS(Form, "bhsd", "bsd", "sd", "packed")
HEADWAY_FUZZ_WORDS(Sharing, "none", "qkv", "kv", "all", "columns")
HEADWAY_FUZZ_WORDS(Pattern, "none", "full", "random", "sparse", "rows", "columns", "tiles", "one_key", "empty")
HEADWAY_FUZZ_WORDS(Spans, "none", "random", "prefix", "first", "documents", "blocks", "hostile")
HEADWAY_FUZZ_WORDS(Lengths, "none", "item", "item32", "row", "row32")
HEADWAY_FUZZ_WORDS(Numbers, "normal", "constant", "equal", "channel", "integers", "apart", "wide", "signed_zeros",
                   "denormal")
HEADWAY_FUZZ_WORDS(Rope, "none", "whole", "interleaved", "partial", "linear", "yarn", "llama3")
HEADWAY_FUZZ_WORDS(CacheFormat, "plain", "int8", "fp8")
HEADWAY_FUZZ_WORDS(FloatType, "none", "f32", "f64", "bf16", "f16")
HEADWAY_FUZZ_WORDS(Place, "query", "hidden_key", "hidden_value", "key", "value", "hidden_bias", "bias", "grad",
                   "hidden_grad", "sink")
HEADWAY_FUZZ_WORDS(Odd, "nan", "inf", "minus_inf", "tiny", "large")
HEADWAY_FUZZ_WORDS(Causal, "none", "square", "top_left", "bottom_right")
HEADWAY_FUZZ_WORDS(Layout, "contiguous", "heads_inside", "gaps", "reversed", "misaligned", "repeated", "repeated_heads",
                   "repeated_rows", "repeated_columns")
#undef HEADWAY_FUZZ_WORDS

template <class Enum>
std::string word(Enum value) {
  return words<Enum>()[static_cast<std::size_t>(value)];
}

template <class Enum>
Enum value_of(const std::string& text) {
  const Words& list = words<Enum>();
  const auto found = std::find(list.begin(), list.end(), text);
  if (found == list.end()) throw std::invalid_argument("a case has no '" + text + "'");
  return static_cast<Enum>(found - list.begin());
}

// ---- One field as text ----

std::string to_text(const std::string& value) { return value.empty() ? "-" : value; }
std::string to_text(bool value) { return value ? "yes" : "no"; }
std::string to_text(std::int64_t value) { return std::to_string(value); }
std::string to_text(std::uint64_t value) { return std::to_string(value); }
std::string to_text(double value) {
  std::ostringstream text;
  text.precision(17);
  text << value;
  return text.str();
}
std::string to_text(DType value) { return name(value); }
template <class Enum>
std::string to_text(Enum value) {
  return word(value);
}
std::string to_text(const std::vector<Plant>& plants) {
  std::string text;
  for (const Plant& one : plants) {
    if (!text.empty()) text += ',';
    text.append(word(one.place)).append(":").append(word(one.odd));
  }
  return text.empty() ? "-" : text;
}

void from_text(const std::string& text, std::string& value) { value = text == "-" ? "" : text; }
void from_text(const std::string& text, bool& value) { value = text == "yes"; }
void from_text(const std::string& text, std::int64_t& value) { value = std::stoll(text); }
void from_text(const std::string& text, std::uint64_t& value) { value = std::stoull(text); }
void from_text(const std::string& text, double& value) { value = std::stod(text); }
void from_text(const std::string& text, DType& value) {
  for (DType one : {DType::f32, DType::f64, DType::bf16, DType::f16})
    if (text == name(one)) {
      value = one;
      return;
    }
  throw std::invalid_argument("a case has no type '" + text + "'");
}
template <class Enum>
void from_text(const std::string& text, Enum& value) {
  value = value_of<Enum>(text);
}
void from_text(const std::string& text, std::vector<Plant>& plants) {
  plants.clear();
  std::istringstream list(text == "-" ? "" : text);
  for (std::string one; std::getline(list, one, ',');) {
    const std::size_t colon = one.find(':');
    if (colon == std::string::npos) throw std::invalid_argument("a plant is place:value, found '" + one + "'");
    plants.push_back({value_of<Place>(one.substr(0, colon)), value_of<Odd>(one.substr(colon + 1))});
  }
}

// Calls visit(name, field) for every field, in the order of a line.
template <class AnyCase, class Visit>
void each_field(AnyCase& one, Visit visit) {
  visit("subject", one.subject), visit("type", one.type), visit("form", one.form);
  visit("b", one.b), visit("h", one.h), visit("hkv", one.hkv), visit("sq", one.sq), visit("sk", one.sk);
  visit("d", one.d), visit("dv", one.dv);
  visit("model", one.model), visit("key_dim", one.key_dim), visit("value_dim", one.value_dim);
  visit("biased", one.biased);
  visit("page", one.page), visit("first", one.first), visit("slack", one.slack), visit("stored", one.stored);
  visit("rope", one.rope);
  visit("q_layout", one.q_layout), visit("k_layout", one.k_layout), visit("v_layout", one.v_layout);
  visit("out_layout", one.out_layout), visit("grad_layout", one.grad_layout);
  visit("option_layout", one.option_layout), visit("sharing", one.sharing);
  visit("mask", one.mask), visit("mask_axes", one.mask_axes), visit("bias", one.bias);
  visit("bias_axes", one.bias_axes), visit("bias_type", one.bias_type), visit("bias_size", one.bias_size);
  visit("trimmed", one.trimmed), visit("expanded", one.expanded);
  visit("causal", one.causal), visit("left", one.left), visit("right", one.right);
  visit("spans", one.spans), visit("span_axes", one.span_axes), visit("span_count", one.span_count);
  visit("span_rows", one.span_rows), visit("narrow_spans", one.narrow_spans);
  visit("valid", one.valid), visit("queries", one.queries);
  visit("scale", one.scale), visit("softcap", one.softcap), visit("alibi", one.alibi);
  visit("alibi_size", one.alibi_size), visit("sinks", one.sinks), visit("sinks_size", one.sinks_size);
  visit("dropout", one.dropout);
  visit("q", one.q), visit("q_size", one.q_size), visit("k", one.k), visit("k_size", one.k_size);
  visit("v", one.v), visit("v_size", one.v_size), visit("grad", one.grad), visit("grad_size", one.grad_size);
  visit("plants", one.plants), visit("seed", one.seed);
}

std::map<std::string, std::string> texts_of(const Case& one) {
  std::map<std::string, std::string> result;
  each_field(one, [&](const char* field, const auto& value) { result[field] = to_text(value); });
  return result;
}

// A cache has sizes of at least 1 and none of the options that its attend refuses.
void legalise_cache(Case& one) {
  const Case plain;
  one.form = Form::bhsd;
  one.b = 1;
  for (auto size : {&Case::h, &Case::hkv, &Case::sq, &Case::sk, &Case::d, &Case::dv, &Case::page})
    one.*size = std::max<std::int64_t>(one.*size, 1);
  if (one.sharing != Sharing::columns) one.sharing = Sharing::none;
  one.mask = one.bias = Pattern::none;
  one.spans = plain.spans;
  one.valid = one.queries = Lengths::none;
  one.dropout = 0;
  one.plants.clear();
  if (one.stored != CacheFormat::plain && one.type == DType::f64) one.type = DType::f32;
  if (one.rope != Rope::none) {
    one.d += one.d % 2;
    one.sharing = Sharing::none;  // values that are rotated are refused
  }
  if (one.left < 0) one.right = -1;
  if (one.left < 0) one.first = one.slack = 0;
  one.first = std::max<std::int64_t>(one.first, 0);
  one.slack = std::max<std::int64_t>(one.slack, 0);
}

bool reads_keys_twice(Layout layout) { return layout >= Layout::repeated; }

std::string in_order(const std::string& axes) {
  std::string result;
  for (char axis : std::string("bhij"))
    if (axes.find(axis) != std::string::npos) result += axis;
  return result;
}

}  // namespace

bool Case::operator==(const Case& other) const { return line_of(*this) == line_of(other); }

std::string line_of(const Case& one) {
  static const std::map<std::string, std::string> defaults = texts_of(Case{});
  std::string line;
  each_field(one, [&](const char* field, const auto& value) {
    const std::string text = to_text(value);
    if (text == defaults.at(field)) return;
    if (!line.empty()) line += ' ';
    line.append(field).append("=").append(text);
  });
  return line.empty() ? "sq=1" : line;
}

Case case_of(const std::string& line) {
  Case result;
  std::istringstream words_of_line(line);
  for (std::string word_of_line; words_of_line >> word_of_line;) {
    const std::size_t equals = word_of_line.find('=');
    bool known = false;
    each_field(result, [&](const char* field, auto& value) {
      if (equals == std::string::npos || word_of_line.compare(0, equals, field) != 0) return;
      from_text(word_of_line.substr(equals + 1), value);
      known = true;
    });
    if (!known) throw std::invalid_argument("a case has no '" + word_of_line + "'");
  }
  return legal(result);
}

bool is_hidden(Place place) {
  return place == Place::hidden_key || place == Place::hidden_value || place == Place::hidden_bias ||
         place == Place::hidden_grad;
}

bool shares_elements(const Case& one) {
  const Layout layouts[] = {one.q_layout, one.k_layout, one.v_layout, one.grad_layout};
  return one.sharing != Sharing::none || one.bias_axes != "bhij" ||
         std::any_of(std::begin(layouts), std::end(layouts), [](Layout layout) { return layout >= Layout::repeated; });
}

double cost(const Case& one) {
  const auto number = [](std::int64_t size) { return static_cast<double>(std::max<std::int64_t>(size, 1)); };
  const double attention =
      number(one.b) * number(one.h) * number(one.sq) * number(one.sk) * number(one.d + one.dv + 16);
  if (one.subject == Subject::attention) return attention;
  if (one.subject == Subject::cache) return 12 * attention;
  const double width = number(one.h) * number(one.d);
  return attention +
         number(one.b) * width *
             (2 * number(one.sq) * number(one.model) + number(one.sk) * (number(one.key_dim) + number(one.value_dim)));
}

Case legal(Case one) {
  for (auto size : {&Case::b, &Case::h, &Case::hkv, &Case::sq, &Case::sk, &Case::d, &Case::dv, &Case::model,
                    &Case::key_dim, &Case::value_dim})
    one.*size = std::max<std::int64_t>(one.*size, 0);
  if (one.subject == Subject::layer) {
    // A layer takes [B,S,model_dim]; its own views split it into heads.
    one.form = Form::bhsd;
    one.dv = one.d = std::max<std::int64_t>(one.d, 1);
    one.h = std::max<std::int64_t>(one.h, 1);
    one.sharing = one.sharing == Sharing::all ? Sharing::all : Sharing::none;
    if (one.sharing == Sharing::all) one.key_dim = one.value_dim = one.model;
    one.plants.clear();
  }
  if (one.subject == Subject::cache) legalise_cache(one);
  if (one.form == Form::bsd || one.form == Form::sd) one.h = one.hkv = 1;
  if (one.form == Form::sd) one.b = 1;
  if (one.form == Form::packed) one.b = std::max<std::int64_t>(one.b, 1);
  if (one.hkv <= 0 || one.h % one.hkv != 0) one.hkv = one.h == 0 ? 1 : one.h % 2 == 0 && one.hkv != 1 ? one.h / 2 : 1;
  if (one.sharing == Sharing::qkv && (one.form == Form::bsd || one.form == Form::sd)) one.sharing = Sharing::kv;
  if (one.sharing == Sharing::qkv || one.sharing == Sharing::all) one.sk = one.sq;
  if (one.sharing == Sharing::all) one.hkv = one.h = std::max<std::int64_t>(one.h, 1);
  if (one.sharing != Sharing::none) {
    one.dv = one.sharing == Sharing::columns ? std::min(one.dv, one.d) : one.d;
    one.v_layout = one.k_layout;
  }
  if (one.sharing == Sharing::qkv || one.sharing == Sharing::all) one.q_layout = one.k_layout;
  for (Layout* output : {&one.out_layout, &one.option_layout})
    if (reads_keys_twice(*output)) *output = Layout::gaps;
  one.mask_axes = in_order(one.mask_axes);
  one.bias_axes = in_order(one.bias_axes);
  // What nothing reads is as in the default case.
  const Case plain;
  if (one.mask == Pattern::none) one.mask_axes = plain.mask_axes;
  if (one.bias == Pattern::none) {
    one.bias_axes = plain.bias_axes;
    one.bias_type = plain.bias_type;
    one.bias_size = plain.bias_size;
  }
  if (one.mask == Pattern::none && one.bias == Pattern::none) {
    one.option_layout = plain.option_layout;
    one.trimmed = one.expanded = false;
  }
  one.span_axes = in_order(one.span_axes);
  std::erase_if(one.span_axes, [](char axis) { return axis == 'i' || axis == 'j'; });
  one.span_count = std::clamp<std::int64_t>(one.span_count, 0, 64);
  one.span_rows = one.form == Form::packed ? 1 : std::max<std::int64_t>(one.span_rows, 1);
  if (one.spans == Spans::none) {
    one.span_axes = plain.span_axes;
    one.span_count = plain.span_count;
    one.span_rows = plain.span_rows;
    one.narrow_spans = plain.narrow_spans;
  }
  if (one.alibi == FloatType::none) one.alibi_size = plain.alibi_size;
  if (one.sinks == FloatType::none) one.sinks_size = plain.sinks_size;
  if (one.subject != Subject::cache) {
    one.page = plain.page;
    one.first = one.slack = 0;
    one.stored = plain.stored;
    one.rope = plain.rope;
  }
  if (one.subject != Subject::layer) {
    one.model = one.key_dim = one.value_dim = 1;
    one.biased = false;
  }
  // Whether a weight of NaN survives being dropped is not said. Sizes past what f16 holds make infinities.
  if (one.dropout > 0) {
    constexpr double most = 1e4;
    if (one.alibi == FloatType::f16) one.alibi_size = std::min(one.alibi_size, most);
    if (one.sinks == FloatType::f16) one.sinks_size = std::min(one.sinks_size, most);
    if (one.bias_type == DType::f16) one.bias_size = std::min(one.bias_size, most);
    std::erase_if(one.plants, [&](const Plant& plant) {
      return plant.odd <= Odd::minus_inf && (!is_hidden(plant.place) || shares_elements(one));
    });
  }
  if (one.causal == Causal::square && one.sq != one.sk) one.causal = Causal::bottom_right;
  if (one.queries == Lengths::row) one.queries = Lengths::item;
  if (one.queries == Lengths::row32) one.queries = Lengths::item32;
  return one;
}

}  // namespace headway::test::fuzz
