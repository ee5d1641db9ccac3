// What the examples share: random inputs, attention written out by hand to compare with, and a report that prints what
// was found beside what was expected and remembers whether they agreed. With the argument --line a program prints only
// one line, for the table of ./dev demo.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "headway/headway.h"

namespace example {

using headway::ConstTensorView;
using headway::Dims;
using headway::DType;
using headway::Tensor;

// ---- Inputs: the same numbers on every machine ----

inline double next_uniform(std::mt19937_64& generator) {
  return std::ldexp(static_cast<double>(generator() >> 11), -53);
}

// Like np.random.rand: uniform in [0, 1).
inline Tensor rand(const Dims& sizes, DType dtype, unsigned seed) {
  std::mt19937_64 generator(seed);
  Tensor values(sizes, DType::f64);
  std::generate_n(values.as<double>(), values.elements(), [&] { return next_uniform(generator); });
  return headway::convert(values, dtype);
}

// Like torch.randn: standard normal, by Box and Muller.
inline Tensor randn(const Dims& sizes, DType dtype, unsigned seed) {
  std::mt19937_64 generator(seed);
  Tensor values(sizes, DType::f64);
  std::generate_n(values.as<double>(), values.elements(), [&] {
    const double radius = std::sqrt(-2 * std::log(1 - next_uniform(generator)));
    return radius * std::cos(2 * std::acos(-1.0) * next_uniform(generator));
  });
  return headway::convert(values, dtype);
}

inline std::vector<double> numbers(ConstTensorView view) {
  const Tensor values = headway::convert(view, DType::f64);
  return {values.as<double>(), values.as<double>() + values.elements()};
}

// ---- By hand, in float64, to compare with ----

// x W + b: x [B,S,in], W [in,out], b [out] or none -> [B,S,out]
inline Tensor linear_by_hand(ConstTensorView x, ConstTensorView weight, const ConstTensorView* bias = nullptr) {
  const std::vector<double> in = numbers(x), w = numbers(weight), b = bias ? numbers(*bias) : std::vector<double>{};
  const auto inputs = static_cast<std::size_t>(weight.size(0)), outputs = static_cast<std::size_t>(weight.size(1));
  Tensor y({x.size(0), x.size(1), weight.size(1)}, DType::f64);
  for (std::size_t row = 0; row < in.size() / inputs; ++row) {
    double* out = y.as<double>() + row * outputs;
    std::copy(b.begin(), b.end(), out);
    for (std::size_t e = 0; e < inputs; ++e) {
      for (std::size_t o = 0; o < outputs; ++o) {
        out[o] += in[row * inputs + e] * w[e * outputs + o];
      }
    }
  }
  return y;
}

// One query row of one head: out = softmax(q K^T / sqrt(d_k)) V over the first `valid` keys. The pointers are at the
// head's first column; rows of k and v are d_model numbers apart.
inline void attend_row_by_hand(const double* q, const double* k, const double* v, double* out, std::int64_t d_k,
                               std::int64_t d_model, std::int64_t valid) {
  std::vector<double> weights(static_cast<std::size_t>(valid));
  for (std::size_t j = 0; j < weights.size(); ++j) {
    const double* key = k + static_cast<std::int64_t>(j) * d_model;
    for (std::int64_t d = 0; d < d_k; ++d) {
      weights[j] += q[d] * key[d] / std::sqrt(static_cast<double>(d_k));
    }
  }
  const double top = *std::max_element(weights.begin(), weights.end());
  double sum = 0;
  for (double& weight : weights) {
    sum += weight = std::exp(weight - top);
  }
  for (std::size_t j = 0; j < weights.size(); ++j) {
    const double* value = v + static_cast<std::int64_t>(j) * d_model;
    for (std::int64_t d = 0; d < d_k; ++d) {
      out[d] += weights[j] / sum * value[d];
    }
  }
}

// Multi-head attention over q [B,Sq,d_model], k and v [B,Sk,d_model], heads side by side -> [B,Sq,d_model].
inline Tensor attention_by_hand(ConstTensorView query, ConstTensorView key, ConstTensorView value, std::int64_t heads,
                                const std::vector<std::int64_t>& valid_lens = {}) {
  const Tensor q = headway::convert(query, DType::f64), k = headway::convert(key, DType::f64);
  const Tensor v = headway::convert(value, DType::f64);
  const std::int64_t d_model = q.size(2), d_k = d_model / heads;
  Tensor out(q.sizes(), DType::f64);
  for (std::int64_t b = 0; b < q.size(0); ++b) {
    const std::int64_t valid = valid_lens.empty() ? k.size(1) : valid_lens[static_cast<std::size_t>(b)];
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < q.size(1); ++i) {
        const std::int64_t row = (b * q.size(1) + i) * d_model + h * d_k;
        const std::int64_t first_key = b * k.size(1) * d_model + h * d_k;
        attend_row_by_hand(q.as<double>() + row, k.as<double>() + first_key, v.as<double>() + first_key,
                           out.as<double>() + row, d_k, d_model, valid);
      }
    }
  }
  return out;
}

// A whole layer by hand: the projections around attention_by_hand.
inline Tensor layer_by_hand(const headway::MultiHeadAttention& layer, ConstTensorView queries, ConstTensorView keys,
                            ConstTensorView values, const std::vector<std::int64_t>& valid_lens = {}) {
  const auto linear = [&](ConstTensorView x, const std::string& letter) {
    if (!layer.config().bias) {
      return linear_by_hand(x, layer.parameter("W_" + letter));
    }
    const ConstTensorView bias = layer.parameter("b_" + letter);
    return linear_by_hand(x, layer.parameter("W_" + letter), &bias);
  };
  const Tensor q = linear(queries, "q"), k = linear(keys, "k"), v = linear(values, "v");
  return linear(attention_by_hand(q, k, v, layer.config().heads, valid_lens), "o");
}

// ---- The report ----

// The shortest of a few runs, in milliseconds.
template <class Action>
double milliseconds(const Action& action) {
  double shortest = HUGE_VAL;
  for (int run = 0; run < 5; ++run) {
    const auto start = std::chrono::steady_clock::now();
    action();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    shortest = std::min(shortest, took.count());
  }
  return shortest;
}

class Report {
 public:
  Report(const std::string& title, int argc, char** argv) : line_only_(argc > 1 && std::string(argv[1]) == "--line") {
    if (line_only_) {
      std::cout.setstate(std::ios::failbit);  // nothing is printed until it is cleared
    }
    std::cout << title << "\n\n";
  }

  void say(const std::string& line) { std::cout << line << '\n'; }

  void shape(const std::string& what, const Dims& found, const Dims& expected) {
    std::cout << what << ' ' << found << "   expected " << expected << verdict(found == expected) << '\n';
  }

  // Every number within `tolerance` of the largest expected one.
  void values(const std::string& what, ConstTensorView found, ConstTensorView expected, double tolerance) {
    const std::vector<double> a = numbers(found), b = numbers(expected);
    double worst = a.size() == b.size() ? 0.0 : HUGE_VAL;
    double largest = 0;
    for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
      // NaN compares with nothing, so a difference counts unless it is small.
      worst = std::fabs(a[i] - b[i]) <= worst ? worst : std::fabs(a[i] - b[i]);
      largest = std::max(largest, std::fabs(b[i]));
    }
    std::cout << what << ": largest difference " << std::setprecision(2) << worst << " among numbers up to "
              << std::setprecision(6) << largest << verdict(worst <= tolerance * largest) << '\n';
    if (tolerance < statistical) {
      worst_share_ = std::max(worst_share_, worst / std::max(largest, 1e-300));
    }
  }

  void truth(const std::string& what, bool holds) { std::cout << what << verdict(holds) << '\n'; }

  void time(const std::string& what, double ms) {
    std::cout << what << ": " << std::setprecision(3) << ms << std::setprecision(6) << " ms\n";
  }

  // What the table of ./dev demo shows: the shape of the document's result, the time of its example, and the time for
  // 1024 tokens of width 512 in 8 heads, which is measured for that table only.
  template <class Small, class Large>
  void headline(const Dims& shape, const Small& small, const Large& large) {
    const double ms = milliseconds(small);
    time("the document's example", ms);
    if (line_only_) {
      headline_ << shape << '\t' << ms << '\t' << milliseconds(large);
    }
  }

  // What main returns.
  int result() {
    std::cout << (failures_ == 0 ? "\nall as expected\n" : "\nNOT as expected\n");
    if (line_only_) {
      std::cout.clear();
      std::cout << headline_.str() << '\t' << std::setprecision(1) << worst_share_ << '\n';
    }
    return failures_ == 0 ? 0 : 1;
  }

 private:
  static constexpr double statistical =
      0.1;  // a tolerance for means of random draws, which says nothing about rounding

  const char* verdict(bool good) {
    failures_ += good ? 0 : 1;
    return good ? "   ok" : "   WRONG";
  }

  int failures_ = 0;
  double worst_share_ = 0;  // of the largest number, over all comparisons
  std::ostringstream headline_;
  bool line_only_;
};

}  // namespace example
