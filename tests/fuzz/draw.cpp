// Which cases are drawn: sizes around the edges of every kernel's tiles, and options, layouts and numbers so that most
// cases hold a few unusual things and every two of them meet often.
#include <algorithm>
#include <cmath>

#include "fuzz/case.h"

namespace headway::test::fuzz {
namespace {

class Draw {
 public:
  explicit Draw(Random& random) : random_(random) {}

  Case attention();
  Case layer();
  Case cache();

 private:
  bool chance(double probability) { return std::bernoulli_distribution(probability)(random_); }
  std::int64_t up_to(std::int64_t largest) { return std::uniform_int_distribution<std::int64_t>(0, largest)(random_); }
  double between(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[up_to(static_cast<std::int64_t>(list.size()) - 1)];
  }

  std::int64_t length();
  std::int64_t width();
  void sizes(Case& one);
  void shrink_to_budget(Case& one, bool keep_widths);
  void layouts(Case& one);
  void masks(Case& one);
  void modifiers(Case& one);
  void numbers(Case& one);
  void plants(Case& one);
  void huge_scores(Case& one);
  std::string axes();
  Layout layout(bool input);

  Random& random_;
};

// Tiles end at multiples of 16, 64, 128 and 256 keys or rows; decode cuts keys into chunks of 512 to 2048.
std::int64_t Draw::length() {
  if (chance(0.02)) return 0;
  if (chance(0.15)) return 1;
  if (chance(0.35)) return 1 + up_to(40);
  const std::int64_t edge = one_of<std::int64_t>(
      {2, 4, 8, 12, 16, 24, 32, 48, 64, 64, 80, 96, 112, 128, 128, 144, 160, 192, 256, 256, 320, 384, 512});
  const std::int64_t offset = one_of<std::int64_t>({-1, 0, 0, 1, 1, 2});
  if (chance(0.03)) return 512 * (1 + up_to(8)) + offset;
  return edge + offset;
}

std::int64_t Draw::width() {
  if (chance(0.02)) return 0;
  if (chance(0.5)) return one_of<std::int64_t>({1, 2, 3, 4, 5, 7, 8, 8, 12, 15, 16, 16, 17, 24, 31, 32, 32, 33, 40});
  if (chance(0.8)) return one_of<std::int64_t>({48, 63, 64, 64, 64, 65, 72, 80, 96, 100, 112, 127, 128, 128, 129});
  return one_of<std::int64_t>({144, 160, 192, 255, 256, 256, 257, 320, 384, 399, 400, 401, 511, 512, 513, 520});
}

void Draw::sizes(Case& one) {
  one.b = chance(0.02) ? 0 : one_of<std::int64_t>({1, 1, 1, 2, 2, 3, 4});
  one.hkv = one_of<std::int64_t>({1, 1, 1, 2, 3});
  one.h = chance(0.01) ? 0 : one.hkv * one_of<std::int64_t>({1, 1, 1, 2, 3, 4, 8});
  one.sq = length();
  one.sk = chance(0.3) ? one.sq : length();
  if (chance(0.12)) one.sq = 1 + up_to(19);  // few queries, many keys: decode
  one.d = width();
  one.dv = chance(0.7) ? one.d : width();
}

// Most cases are small, since a case's time grows with its size; the budget of a few lets every tile of the largest
// kernels occur.
void Draw::shrink_to_budget(Case& one, bool keep_widths) {
  const double most = chance(0.001) ? 3e7 : chance(0.01) ? 4e6 : chance(0.1) ? 4e5 : 2e4;
  const double budget = std::exp(between(std::log(1e3), std::log(most)));
  while (cost(one) > budget) {
    std::int64_t* size = one_of<std::int64_t*>({&one.b, &one.h, &one.sq, &one.sk, &one.d, &one.dv, &one.d, &one.dv});
    if (*size <= 1 || (keep_widths && (size == &one.d || size == &one.dv) && one.sq * one.sk > 1)) continue;
    if (size == &one.b)
      *size = 1 + up_to(*size - 2);
    else if (size == &one.h)
      *size = one.hkv = 1;
    else if (size == &one.sq)
      *size = std::min(*size - 1, std::max<std::int64_t>(length(), 1));
    else if (size == &one.sk)
      *size = std::min(*size - 1, std::max<std::int64_t>(length(), 1));
    else
      *size = std::min(*size - 1, std::max<std::int64_t>(width(), 1));
  }
}

Layout Draw::layout(bool input) {
  if (chance(0.45)) return Layout::contiguous;
  const auto last = static_cast<std::int64_t>(input ? Layout::repeated_columns : Layout::misaligned);
  if (input && chance(0.7)) return layout(false);
  return static_cast<Layout>(1 + up_to(last - 1));
}

void Draw::layouts(Case& one) {
  if (chance(0.4)) {
    const Layout together = layout(true);
    one.q_layout = one.k_layout = one.v_layout = one.grad_layout = together;
  } else {
    one.q_layout = layout(true);
    one.k_layout = layout(true);
    one.v_layout = layout(true);
    one.grad_layout = layout(true);
  }
  one.out_layout = layout(false);
  one.option_layout = layout(false);
  if (chance(0.15)) one.sharing = static_cast<Sharing>(1 + up_to(3));
}

std::string Draw::axes() {
  if (chance(0.35)) return "bhij";
  std::string result;
  for (char axis : std::string("bhij"))
    if (chance(0.6)) result += axis;
  return result;
}

void Draw::masks(Case& one) {
  const auto pattern = [&] { return chance(0.4) ? Pattern::random : static_cast<Pattern>(1 + up_to(7)); };
  if (chance(0.25)) one.mask = pattern();
  one.mask_axes = axes();
  if (chance(0.3)) one.bias = chance(0.5) ? Pattern::full : pattern();
  one.bias_axes = axes();
  one.bias_type = chance(0.5) ? one.type : one_of({DType::f32, DType::f64, DType::bf16, DType::f16});
  one.bias_size = chance(0.8) ? 1 : one_of({0.0, 1e-30, 30.0, 1e3, 1e4, 1e10, 1e36});
  one.trimmed = chance(0.3);
  one.expanded = chance(0.15);
  if (chance(0.4)) one.causal = static_cast<Causal>(1 + up_to(2));
  if (chance(0.2)) {
    const auto side = [&] {
      if (chance(0.1)) return one_of<std::int64_t>({one.sk + 1, one.sq + one.sk, 1ll << 31, 1ll << 62, INT64_MAX});
      return chance(0.4) ? up_to(3) : up_to(std::max<std::int64_t>(one.sk, 1));
    };
    if (chance(0.75)) one.left = side();
    if (chance(0.6)) one.right = side();
  }
  if (chance(0.25)) {
    one.spans = static_cast<Spans>(1 + up_to(5));
    one.span_axes = one_of({std::string("bh"), std::string("b"), std::string("h"), std::string()});
    one.span_count = chance(0.7) ? 1 + up_to(3) : up_to(12);
    one.span_rows = chance(0.6) ? 1 : one_of({2, 16, 64, 100, 128});
    one.narrow_spans = chance(0.3);
  }
  if (chance(0.25)) one.valid = static_cast<Lengths>(1 + up_to(3));
  if (chance(0.2)) one.queries = static_cast<Lengths>(1 + up_to(1));
}

void Draw::modifiers(Case& one) {
  if (chance(0.25)) one.scale = one_of({0.0, 0.3, -0.7, 1.0, 4.0, -1.0, 1e-3, 1e-30, -0.0});
  if (chance(0.15)) one.softcap = one_of({0.7, 5.0, 30.0, 50.0, 1e-3, 1e4, 1e-40, 1e39, 1e-30});
  const auto float_type = [&] { return static_cast<FloatType>(1 + up_to(3)); };
  if (chance(0.15)) one.alibi = float_type();
  one.alibi_size = chance(0.8) ? 0.2 : one_of({0.0, 8.0, 1e3, 1e10, 1e33});
  if (chance(0.15)) one.sinks = float_type();
  one.sinks_size = chance(0.7) ? 1 : one_of({0.0, 20.0, 300.0, 1e4, 1e30});
  if (chance(0.15)) one.dropout = one_of({0.1, 0.3, 0.5, 0.9, 1.0, 1e-12, 1 - 1e-9});
}

// q and k so that scores come to about 1e3 to 1e38; the type may end below that.
void Draw::huge_scores(Case& one) {
  const double largest = one.type == DType::f16 ? 3e4 : 1e37;
  const double wanted = std::pow(10.0, between(3, chance(0.3) ? 37.5 : 9));
  if (chance(0.2)) one.scale = std::pow(10.0, between(-37, 37.9)) * one_of({1, -1});
  const double scale =
      std::isnan(one.scale) ? 1 / std::sqrt(std::max<double>(static_cast<double>(one.d), 1)) : one.scale;
  const double product =
      wanted / std::max(std::abs(scale) * static_cast<double>(std::max<std::int64_t>(one.d, 1)), 1e-36);
  const double share = chance(0.6) ? 0.5 : between(0.2, 0.8);
  const double least = one.type == DType::f16 ? 1e-4 : 1e-18;
  one.q_size = std::clamp(std::pow(product, share), least, largest);
  one.k_size = std::clamp(product / one.q_size, least, largest);
  const auto kind = [&] { return chance(0.4) ? Numbers::constant : static_cast<Numbers>(up_to(6)); };
  one.q = kind();
  one.k = kind();
  for (Numbers* numbers : {&one.q, &one.k})  // normal numbers pass their size by up to 6
    if (*numbers != Numbers::constant && *numbers != Numbers::integers) one.q_size /= 36;
}

void Draw::numbers(Case& one) {
  const auto kind = [&] { return chance(0.75) ? Numbers::normal : static_cast<Numbers>(up_to(8)); };
  one.q = kind();
  one.k = kind();
  one.v = kind();
  one.grad = kind();
  if (chance(0.12))
    huge_scores(one);
  else if (chance(0.1))
    one.q_size = one_of({8.0, 64.0, 1e-3, 1e-10, 1e-20, 0.0});
  const double largest = one.type == DType::f16 ? 1e3 : 1e17;
  if (chance(0.1)) one.v_size = one_of({largest, 100.0, 1e-10, 1e-30, 1e-37, 1e-4});
  if (chance(0.1)) one.grad_size = one_of({largest, 100.0, 1e-10, 1e-30, 1e-37, 1e-4});
}

void Draw::plants(Case& one) {
  if (!chance(0.25)) return;
  const std::int64_t count = 1 + up_to(2);
  for (std::int64_t n = 0; n < count; ++n) {
    const Odd odd = chance(0.5) ? Odd::nan : static_cast<Odd>(up_to(4));
    one.plants.push_back({static_cast<Place>(up_to(9)), odd});
  }
}

Case Draw::attention() {
  Case one;
  one.type = chance(0.4) ? DType::f32 : one_of({DType::f64, DType::bf16, DType::bf16, DType::f16});
  one.form = chance(0.6) ? Form::bhsd : one_of({Form::bsd, Form::sd, Form::packed, Form::packed});
  sizes(one);
  layouts(one);
  const bool latent = chance(0.02);
  if (latent) {  // heads as multi-head latent attention has them: of one key head, or each its own
    one.d = chance(0.7) ? 576 : 192;
    one.dv = one.d == 576 ? 512 : 128;
    if (chance(0.7)) one.sharing = Sharing::columns;
  }
  one = legal(one);
  shrink_to_budget(one, latent);
  masks(one);
  modifiers(one);
  numbers(one);
  plants(one);
  one.seed = random_();
  return legal(one);
}

Case Draw::layer() {
  Case one;
  one.subject = Subject::layer;
  one.type = one_of({DType::f32, DType::f64, DType::bf16, DType::bf16, DType::f16});
  sizes(one);
  one.sq = std::min<std::int64_t>(one.sq, 300);
  one.sk = std::min<std::int64_t>(one.sk, 300);
  one.d = std::min<std::int64_t>(one.d, 64);
  const auto dim = [&] { return 1 + (chance(0.5) ? up_to(40) : std::min<std::int64_t>(width(), 256)); };
  one.model = dim();
  one.key_dim = chance(0.6) ? one.model : dim();
  one.value_dim = chance(0.6) ? one.model : dim();
  one.biased = chance(0.5);
  layouts(one);
  if (one.sharing != Sharing::none) one.sharing = Sharing::all;
  one = legal(one);
  for (const double budget = chance(0.1) ? 3e5 : 2e4; cost(one) > budget;) {
    std::int64_t* size = one_of({&one.b, &one.h, &one.sq, &one.sk, &one.model, &one.d});
    if (*size > 1) *size = 1 + up_to(*size - 2);
    one = legal(one);
  }
  masks(one);
  modifiers(one);
  one.bias_size = std::min(one.bias_size, 30.0);
  one.scale = chance(0.8) ? std::numeric_limits<double>::quiet_NaN() : one.scale;
  if (chance(0.2)) one.q_size = one_of({1e-20, 1e-3, 1e-15});
  if (chance(0.1)) one.k_size = one_of({1e-20, 1e-3, 1e-15});
  if (chance(0.1)) one.v_size = one_of({1e-20, 1e-3, 100.0});
  one.q = chance(0.7) ? Numbers::normal : one_of({Numbers::wide, Numbers::signed_zeros, Numbers::integers});
  one.seed = random_();
  return legal(one);
}

Case Draw::cache() {
  Case one;
  one.subject = Subject::cache;
  one.type = one_of({DType::f32, DType::f64, DType::bf16, DType::f16});
  sizes(one);
  one.sk = 1 + up_to(chance(0.8) ? 40 : 300);
  one.sq = 1 + up_to(chance(0.8) ? 8 : 40);
  one.page = one_of<std::int64_t>({1, 2, 3, 4, 8, 16, 16, 24, 64});
  one.stored = chance(0.6) ? CacheFormat::plain : one_of({CacheFormat::int8, CacheFormat::fp8});
  if (chance(0.4)) one.rope = static_cast<Rope>(1 + up_to(5));
  layouts(one);
  one.sharing = chance(0.15) ? Sharing::columns : Sharing::none;
  if (chance(0.5)) {
    one.left = chance(0.1) ? one_of<std::int64_t>({1ll << 62, INT64_MAX}) : up_to(chance(0.5) ? 6 : one.sk);
    if (chance(0.3)) one.right = up_to(4);
    if (chance(0.5)) one.first = up_to(chance(0.7) ? 5 : one.sk);
    if (chance(0.3)) one.slack = chance(0.1) ? INT64_MAX : up_to(9);
  }
  one = legal(one);
  shrink_to_budget(one, false);
  modifiers(one);
  one.causal = chance(0.7) ? Causal::bottom_right : chance(0.3) ? Causal::top_left : Causal::none;
  numbers(one);
  one.seed = random_();
  return legal(one);
}

}  // namespace

Case draw(Random& random) {
  Draw one(random);
  const double kind = std::uniform_real_distribution<double>(0, 1)(random);
  return kind < 0.06 ? one.layer() : kind < 0.1 ? one.cache() : one.attention();
}

}  // namespace headway::test::fuzz
