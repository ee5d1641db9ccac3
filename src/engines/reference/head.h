// One head of one batch item as the definition sees it: numbers read as float64, scores modified in the contract's
// order.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "core/elements.h"
#include "core/key_range.h"
#include "core/problem.h"
#include "core/spans.h"

namespace headway::reference {

inline constexpr double infinity = std::numeric_limits<double>::infinity();

// Neumaier's sum: rounding errors are accumulated separately, so that long rows stay exact to the last bits.
class Sum {
 public:
  void add(double value) {
    const double next = sum_ + value;
    lost_ += std::fabs(sum_) >= std::fabs(value) ? (sum_ - next) + value : (value - next) + sum_;
    sum_ = next;
  }
  // The compensation of an infinite or NaN sum is meaningless.
  double value() const { return std::isfinite(lost_) ? sum_ + lost_ : sum_; }

 private:
  double sum_ = 0;
  double lost_ = 0;
};

// One vector (a row of query, key, value, ...) of a [B,H,S,D] view.
template <class T>
struct Vector {
  const T* data;
  std::int64_t stride;
  double operator[](std::int64_t d) const { return converted<double>(data[d * stride]); }
};

// A row of 8-bit numbers that count as float32 after multiplication by its scale.
template <class T>
struct ScaledVector {
  Vector<T> row;
  float scale;
  double operator[](std::int64_t d) const { return scale * static_cast<float>(row[d]); }
};

template <class T>
Vector<T> vector_at(const ConstTensorView& view, std::int64_t b, std::int64_t h, std::int64_t row) {
  return {static_cast<const T*>(view.data()) + row_offset(view, b, h, row), view.stride(3)};
}

template <class X, class Y>
double dot(const X& x, const Y& y, std::int64_t size) {
  Sum result;
  for (std::int64_t d = 0; d < size; ++d) {
    result.add(x[d] * y[d]);
  }
  return result.value();
}

// An allowed key of a row, with its score after scaling, softcap, bias and ALiBi.
struct Scored {
  std::int64_t key;
  double score;
  double cap_slope;  // d(capped) / d(scaled): 1 without softcap
};

// T is the query's type, Row what keys and values are stored as: the same, or in pages an 8-bit type.
template <class T, class Row = T>
class Head {
 public:
  Head(const Problem& problem, std::int64_t b, std::int64_t h)
      : problem_(problem), b_(b), h_(h), g_(problem.kv_head(h)), sequence_(headway::sequence(problem, b)) {
    if (problem.alibi_slopes) {
      slope_ = load_float(*problem.alibi_slopes, h * problem.alibi_slopes->stride(0));
    }
    if (problem.sinks) {
      sink_ = load_float(*problem.sinks, h * problem.sinks->stride(0));
    }
  }

  const Sequence& sequence() const { return sequence_; }
  std::optional<double> sink() const { return sink_; }
  bool is_padding(std::int64_t i) const { return i >= sequence_.real_queries; }

  Vector<T> query(std::int64_t i) const { return vector_at<T>(problem_.query, b_, h_, sequence_.query_begin + i); }
  auto key(std::int64_t j) const { return key_row(problem_.key, &Pages::key_scales, j); }
  auto value(std::int64_t j) const { return key_row(problem_.value, &Pages::value_scales, j); }

  double scaled(std::int64_t i, std::int64_t j) const {
    return problem_.scale * dot(query(i), key(j), problem_.head_dim);
  }
  double capped(double scaled) const {
    return problem_.softcap ? *problem_.softcap * std::tanh(scaled / *problem_.softcap) : scaled;
  }
  double dropout_factor(std::int64_t i, std::int64_t j) const {
    const Origin& origin = problem_.origin;
    return problem_.dropout.active()
               ? problem_.dropout.factor(origin.batch + b_, origin.head + h_, origin.query + i, origin.key + j)
               : 1.0;
  }

  // The allowed keys of row i in ascending order. A forbidden key is not read, so that what it holds cannot matter.
  void score_row(std::int64_t i, std::vector<Scored>& row) const {
    row.clear();
    for_key_parts(problem_, sequence_, b_, h_, i, [&](const KeyRange& part) {
      for (std::int64_t j = part.begin; j < part.end; ++j) {
        score_key(i, j, row);
      }
    });
  }

  template <class View>
  std::int64_t matrix_offset(const View& matrix, std::int64_t i, std::int64_t j) const {
    return row_offset(matrix, b_, h_, i) + j * matrix.stride(3);
  }

 private:
  // Row j of the sequence's keys or values: behind those of the sequences before it, or in its page.
  auto key_row(const ConstTensorView& rows, std::optional<ConstTensorView> Pages::*scales, std::int64_t j) const {
    std::int64_t item = b_, at = sequence_.key_begin + j;
    if (problem_.pages) {
      const Pages& pages = *problem_.pages;
      item = load_integer(pages.table, b_ * pages.table.stride(0) + j / pages.size * pages.table.stride(1));
      at = j % pages.size;
    }
    if constexpr (std::is_same_v<T, Row>) {
      return vector_at<T>(rows, item, g_, at);
    } else {
      const ConstTensorView& scale = *((*problem_.pages).*scales);
      return ScaledVector<Row>{vector_at<Row>(rows, item, g_, at),
                               static_cast<const float*>(scale.data())[row_offset(scale, item, g_, at)]};
    }
  }

  void score_key(std::int64_t i, std::int64_t j, std::vector<Scored>& row) const {
    const double bias = problem_.bias ? load_float(*problem_.bias, matrix_offset(*problem_.bias, i, j)) : 0.0;
    const bool masked = problem_.mask && !load_bool(*problem_.mask, matrix_offset(*problem_.mask, i, j));
    if (masked || bias == -infinity) {
      return;
    }
    const double distance = std::fabs(static_cast<double>(i + sequence_.offset - j));
    const double alibi = slope_ ? -*slope_ * distance : 0.0;
    const double cap = capped(scaled(i, j));
    const double cap_slope = problem_.softcap ? 1.0 - (cap / *problem_.softcap) * (cap / *problem_.softcap) : 1.0;
    row.push_back({j, cap + bias + alibi, cap_slope});
  }

  const Problem& problem_;
  std::int64_t b_, h_, g_;
  Sequence sequence_;
  std::optional<double> slope_, sink_;
};

// The softmax of a row: exp(s - highest) / total for each allowed key, and lse = highest + log(total).
struct Softmax {
  double highest = -infinity;
  double total = 0;

  Softmax(const std::vector<Scored>& row, const std::optional<double>& sink) {
    highest = sink.value_or(-infinity);
    for (const Scored& scored : row) {
      highest = std::fmax(highest, scored.score);  // a NaN shows in the total
    }
    Sum sum;
    for (const Scored& scored : row) {
      sum.add(std::exp(scored.score - highest));
    }
    if (sink) {
      sum.add(*sink == infinity ? 1.0 : std::exp(*sink - highest));  // an infinite one has all weight
    }
    total = sum.value();
  }

  double weight(const Scored& scored) const { return std::exp(scored.score - highest) / total; }
  double lse() const { return highest + std::log(total); }
};

}  // namespace headway::reference
