// What the layer's tests share: draws, comparisons, and the layer once more in textbook loops over float64 numbers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "headway/headway.h"
#include "support/error_text.h"

namespace headway::test {

inline const DType float_types[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-53;
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
    default: return 0x1p-24;
  }
}

// Numbers in (-1, 1), rounded to the type.
inline Tensor random_tensor(const Dims& sizes, DType dtype, unsigned seed) {
  std::mt19937_64 generator(seed);
  Tensor values(sizes, DType::f64);
  std::generate_n(values.as<double>(), values.elements(),
                  [&] { return std::ldexp(static_cast<double>(generator() >> 11), -52) - 1.0; });
  return convert(values, dtype);
}

inline std::vector<double> numbers(ConstTensorView view) {
  const Tensor values = convert(view, DType::f64);
  return {values.as<double>(), values.as<double>() + values.elements()};
}

inline bool same_bits(ConstTensorView a, ConstTensorView b) {
  const Tensor left = convert(a, a.dtype());
  const Tensor right = convert(b, b.dtype());
  return left.dtype() == right.dtype() && left.sizes() == right.sizes() &&
         std::memcmp(left.data(), right.data(), static_cast<std::size_t>(left.elements()) * size_of(left.dtype())) == 0;
}

inline double largest(const std::vector<double>& values) {
  double result = 0;
  for (const double value : values) {
    result = std::max(result, std::fabs(value));
  }
  return result;
}

// Every element within `tolerance` of the largest expected one.
inline void expect_close(const std::vector<double>& found, const std::vector<double>& expected, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  const double allowed = tolerance * std::max(1.0, largest(expected));
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_LE(std::fabs(found[i] - expected[i]), allowed)
        << what << "[" << i << "] is " << found[i] << ", expected " << expected[i];
  }
}

// Parameters that look trained: everything non-zero, biases too.
inline MultiHeadAttention random_layer(const MultiHeadAttentionConfig& config, unsigned seed = 1) {
  MultiHeadAttention layer(config);
  for (auto& [name, view] : layer.parameters()) {
    copy(random_tensor(view.sizes(), config.dtype, seed++), view);
  }
  return layer;
}

struct Inputs {
  Tensor queries, keys, values;
};

inline Inputs random_inputs(const MultiHeadAttentionConfig& config, std::int64_t batch, std::int64_t query_len,
                            std::int64_t key_len, unsigned seed = 100) {
  return {random_tensor({batch, query_len, config.model_dim}, config.dtype, seed),
          random_tensor({batch, key_len, config.key_dim}, config.dtype, seed + 1),
          random_tensor({batch, key_len, config.value_dim}, config.dtype, seed + 2)};
}

// ---- The layer once more ----

using Matrix = std::vector<std::vector<double>>;

inline Matrix zeros(std::int64_t rows, std::int64_t columns) {
  return Matrix(static_cast<std::size_t>(rows), std::vector<double>(static_cast<std::size_t>(columns), 0.0));
}

inline Matrix matrix(ConstTensorView view) {  // [rows, columns]
  Matrix result = zeros(view.size(0), view.size(1));
  const std::vector<double> flat = numbers(view);
  for (std::size_t i = 0, next = 0; i < result.size(); ++i) {
    for (double& element : result[i]) {
      element = flat[next++];
    }
  }
  return result;
}

inline Matrix textbook_linear(const Matrix& x, const MultiHeadAttention& layer, const std::string& letter) {
  const Matrix weight = matrix(layer.parameter("W_" + letter));
  const std::size_t width = weight[0].size();
  const std::vector<double> bias =
      layer.config().bias ? numbers(layer.parameter("b_" + letter)) : std::vector<double>(width, 0.0);
  Matrix y(x.size(), bias);
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t o = 0; o < width; ++o) {
      for (std::size_t e = 0; e < weight.size(); ++e) {
        y[i][o] += x[i][e] * weight[e][o];
      }
    }
  }
  return y;
}

using Allowed = std::function<bool(std::int64_t b, std::int64_t i, std::int64_t j)>;

struct TextbookResult {
  std::vector<double> y;        // [B,Sq,model_dim]
  std::vector<double> weights;  // [B,H,Sq,Sk]
};

// softmax of one row of scores; all 0 where nothing is allowed.
inline std::vector<double> textbook_softmax(const std::vector<double>& scores) {
  const double top = *std::max_element(scores.begin(), scores.end());
  std::vector<double> weights(scores.size(), 0.0);
  double sum = 0;
  for (std::size_t j = 0; top > -HUGE_VAL && j < scores.size(); ++j) {
    sum += weights[j] = std::exp(scores[j] - top);
  }
  for (double& weight : weights) {
    weight = sum > 0 ? weight / sum : 0.0;
  }
  return weights;
}

// queries [B,Sq,model_dim] and so on; every tensor is read as float64.
inline TextbookResult textbook(
    const MultiHeadAttention& layer, const Inputs& in, const Allowed& allowed = [](auto, auto, auto) { return true; }) {
  const MultiHeadAttentionConfig& config = layer.config();
  const auto head_dim = static_cast<std::size_t>(config.head_dim);
  TextbookResult result;
  for (std::int64_t b = 0; b < in.queries.size(0); ++b) {
    const Matrix q = textbook_linear(matrix(in.queries.view().select(0, b)), layer, "q");
    const Matrix k = textbook_linear(matrix(in.keys.view().select(0, b)), layer, "k");
    const Matrix v = textbook_linear(matrix(in.values.view().select(0, b)), layer, "v");
    Matrix context = zeros(in.queries.size(1), config.heads * config.head_dim);
    for (std::int64_t h = 0; h < config.heads; ++h) {
      const std::size_t at = static_cast<std::size_t>(h) * head_dim;
      const std::size_t kv_at = static_cast<std::size_t>(h / (config.heads / config.kv_heads)) * head_dim;
      for (std::size_t i = 0; i < q.size(); ++i) {
        std::vector<double> scores(k.size(), -HUGE_VAL);
        for (std::size_t j = 0; j < k.size(); ++j) {
          if (allowed(b, static_cast<std::int64_t>(i), static_cast<std::int64_t>(j))) {
            double dot = 0;
            for (std::size_t d = 0; d < head_dim; ++d) {
              dot += q[i][at + d] * k[j][kv_at + d];
            }
            scores[j] = dot / std::sqrt(static_cast<double>(head_dim));
          }
        }
        const std::vector<double> weights = textbook_softmax(scores);
        result.weights.insert(result.weights.end(), weights.begin(), weights.end());
        for (std::size_t j = 0; j < k.size(); ++j) {
          for (std::size_t d = 0; d < head_dim; ++d) {
            context[i][at + d] += weights[j] * v[j][kv_at + d];
          }
        }
      }
    }
    for (const std::vector<double>& row : textbook_linear(context, layer, "o")) {
      result.y.insert(result.y.end(), row.begin(), row.end());
    }
  }
  return result;
}

// The layers whose numbers are compared: every kind of shape, with and without biases.
struct NamedConfig {
  std::string name;
  MultiHeadAttentionConfig config;
};

inline std::vector<NamedConfig> config_zoo(DType dtype) {
  std::vector<NamedConfig> zoo = {
      {"one head", {.model_dim = 5, .heads = 1}},
      {"two heads with biases", {.model_dim = 6, .heads = 2, .bias = true}},
      {"grouped queries", {.model_dim = 8, .heads = 4, .kv_heads = 2, .bias = true}},
      {"one kv head, its own head_dim", {.model_dim = 6, .heads = 4, .kv_heads = 1, .head_dim = 3}},
      {"separate input widths", {.model_dim = 6, .heads = 3, .key_dim = 5, .value_dim = 7, .bias = true}},
  };
  for (NamedConfig& entry : zoo) {
    entry.config.dtype = dtype;
  }
  return zoo;
}

}  // namespace headway::test
