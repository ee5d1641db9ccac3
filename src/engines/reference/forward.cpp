// Forward, row by row: the scores of the allowed keys, their softmax, the weighted sum of the values.
#include <algorithm>
#include <vector>

#include "core/progress.h"
#include "engines/reference/head.h"
#include "engines/reference/passes.h"

namespace headway::reference {
namespace {

template <class T, class Row>
class Forward {
 public:
  explicit Forward(const ForwardProblem& problem)
      : problem_(problem), sums_(static_cast<std::size_t>(problem.value_dim)) {}

  void run() {
    ProgressMeter meter(problem_.operation, problem_.progress, total_rows());
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      for (std::int64_t h = 0; h < problem_.heads; ++h) {
        const Head<T, Row> head(problem_, b, h);
        for (std::int64_t i = 0; i < head.sequence().query_count; ++i) {
          attend(head, b, h, i);
          meter.advance();
        }
      }
    }
  }

 private:
  std::int64_t total_rows() const {
    const std::int64_t rows = problem_.query_rows();
    return rows * problem_.heads;
  }

  // out(i) = sum_j dropout(p(i,j)) v(j)
  void attend(const Head<T, Row>& head, std::int64_t b, std::int64_t h, std::int64_t i) {
    head.score_row(i, row_);
    const std::optional<double> sink = head.is_padding(i) ? std::nullopt : head.sink();
    const Softmax softmax(row_, sink);
    sums_.assign(sums_.size(), Sum{});
    if (problem_.weights) {
      clear_weights(head, i);
    }
    for (const Scored& scored : row_) {
      const double weight = softmax.weight(scored);
      if (problem_.weights) {
        store_float(*problem_.weights, head.matrix_offset(*problem_.weights, i, scored.key), weight);
      }
      add_value(head.value(scored.key), weight * head.dropout_factor(i, scored.key));
    }
    const std::int64_t row = head.sequence().query_begin + i;
    store_out(b, h, row);
    if (problem_.lse) {
      // Without a key the sum is empty: lse is the sink, or -inf.
      const double lse = row_.empty() ? sink.value_or(-infinity) : softmax.lse();
      store_float(*problem_.lse, row_offset(*problem_.lse, b, h, row), within_range(lse, problem_.lse->dtype()));
    }
  }

  // A finite lse beyond the range of f32 (after a float64 bias of -1e300) becomes the nearest finite number, so that
  // the backward stays finite too.
  static double within_range(double lse, DType dtype) {
    constexpr double highest = std::numeric_limits<float>::max();
    return dtype == DType::f32 && std::isfinite(lse) ? std::clamp(lse, -highest, highest) : lse;
  }

  template <class Value>
  void add_value(const Value& value, double weight) {
    for (std::size_t d = 0; d < sums_.size(); ++d) {
      sums_[d].add(weight * value[static_cast<std::int64_t>(d)]);
    }
  }

  void clear_weights(const Head<T, Row>& head, std::int64_t i) {
    for (std::int64_t j = 0; j < problem_.key_len; ++j) {
      store_float(*problem_.weights, head.matrix_offset(*problem_.weights, i, j), 0.0);
    }
  }

  void store_out(std::int64_t b, std::int64_t h, std::int64_t row) {
    T* out = static_cast<T*>(problem_.out.data()) + row_offset(problem_.out, b, h, row);
    for (std::size_t d = 0; d < sums_.size(); ++d) {
      out[static_cast<std::int64_t>(d) * problem_.out.stride(3)] = converted<T>(sums_[d].value());
    }
  }

  const ForwardProblem& problem_;
  std::vector<Scored> row_;
  std::vector<Sum> sums_;  // [Dv]
};

}  // namespace

void forward(const ForwardProblem& problem) {
  with_float_type(problem.dtype(), [&](auto type) {
    using T = decltype(type);
    switch (problem.key_dtype()) {
      case DType::i8: Forward<T, std::int8_t>(problem).run(); break;
      case DType::f8e4m3: Forward<T, float8_e4m3>(problem).run(); break;
      default: Forward<T, T>(problem).run(); break;
    }
  });
}

}  // namespace headway::reference
