// Backward, row by row, from the saved out and lse:
//   p = exp(s - lse)      dv(j) += dropout(p) dout(i)      dp = dropout_factor <dout(i), v(j)>
//   ds = p (dp - delta)   with delta(i) = <dout(i), out(i)>; it is also the gradient of the bias
//   dx = ds * softcap'    dq(i) += scale dx k(j)           dk(j) += scale dx q(i)
//   dsink -= exp(sink - lse) delta
// Keys gather from many rows, and with grouped heads from several heads, in one fixed order. A saved lse is one rounded
// number: where it is large, the row's softmax is taken from its scores again.
#include <algorithm>
#include <vector>

#include "core/progress.h"
#include "engines/reference/head.h"
#include "engines/reference/passes.h"

namespace headway::reference {
namespace {

// Exact sums for the gradient of a bias, which has size 1 along the axes to sum over.
class BiasGradient {
 public:
  explicit BiasGradient(const std::optional<TensorView>& target) : target_(target) {
    if (!target_) {
      return;
    }
    sums_.resize(static_cast<std::size_t>(checked_elements(target_->sizes(), DType::f64)));
    strides_ = contiguous_strides(target_->sizes());
    for (int axis = 0; axis < strides_.size(); ++axis) {
      strides_[axis] = target_->size(axis) == 1 ? 0 : strides_[axis];
    }
  }

  void add(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, double value) {
    if (target_) {
      sums_[static_cast<std::size_t>(b * strides_[0] + h * strides_[1] + i * strides_[2] + j * strides_[3])].add(value);
    }
  }

  void store() const {
    if (target_) {
      std::vector<double> values;
      for (const Sum& sum : sums_) {
        values.push_back(sum.value());
      }
      copy(ConstTensorView(values.data(), target_->sizes()), *target_);
    }
  }

 private:
  std::optional<TensorView> target_;
  Dims strides_;
  std::vector<Sum> sums_;
};

template <class T>
class Backward {
 public:
  explicit Backward(const BackwardProblem& problem)
      : problem_(problem),
        dbias_(problem.dbias),
        dk_(static_cast<std::size_t>(problem.key_len * problem.head_dim)),
        dv_(static_cast<std::size_t>(problem.key_len * problem.value_dim)),
        dq_(static_cast<std::size_t>(problem.head_dim)),
        dsinks_(static_cast<std::size_t>(problem.heads)) {}

  void run() {
    const std::int64_t group = problem_.kv_heads > 0 ? problem_.heads / problem_.kv_heads : 0;
    const std::int64_t rows = problem_.query_rows();
    ProgressMeter meter(problem_.operation, problem_.progress, rows * problem_.heads);
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      for (std::int64_t g = 0; g < problem_.kv_heads; ++g) {
        std::fill(dk_.begin(), dk_.end(), Sum());
        std::fill(dv_.begin(), dv_.end(), Sum());
        for (std::int64_t h = g * group; h < (g + 1) * group; ++h) {
          const Head<T> head(problem_, b, h);
          for (std::int64_t i = 0; i < head.sequence().query_count; ++i) {
            differentiate(head, b, h, i);
            meter.advance();
          }
        }
        store_keys(b, g);
      }
    }
    store_sums();
  }

 private:
  void differentiate(const Head<T>& head, std::int64_t b, std::int64_t h, std::int64_t i) {
    std::fill(dq_.begin(), dq_.end(), Sum());
    head.score_row(i, row_);
    const std::int64_t row = head.sequence().query_begin + i;
    if (!row_.empty()) {  // a row without keys has no gradient, and its grad_out is not read
      const Vector<T> dout = vector_at<T>(problem_.grad_out, b, h, row);
      const Vector<T> out = vector_at<T>(problem_.out, b, h, row);
      RowSoftmax softmax{0, load_float(problem_.lse, row_offset(problem_.lse, b, h, row)),
                         dot(dout, out, problem_.value_dim)};
      if (is_large(softmax.lse)) {
        take_again(head, i, dout, softmax);
      }
      for (const Scored& scored : row_) {
        differentiate_pair(head, b, h, i, scored, dout, softmax);
      }
      if (head.sink()) {
        dsinks_[static_cast<std::size_t>(h)].add(-softmax.weight(*head.sink()) * softmax.delta);
      }
    }
    if (problem_.dq) {
      store_vector(*problem_.dq, b, h, row, dq_.data(), problem_.head_dim);
    }
  }

  // A row's softmax: scores and lse count from `reference`, which is 0 but for a large lse.
  struct RowSoftmax {
    double reference, lse;
    double delta;

    double weight(double score) const {
      const double exponent = (score == reference ? 0.0 : score - reference) - lse;  // of an infinite sink, too
      return std::exp(exponent > 0 ? 0 : exponent);                                  // NaN stays NaN
    }
  };

  // From where on rounding the saved lse costs 2^-12 of a weight.
  bool is_large(double lse) const {
    return std::fabs(lse) > (problem_.lse.dtype() == DType::f64 ? 0x1p41 : 0x1p12) && lse != -infinity;
  }

  // From the row's own scores. The lse of a row with more keys, of which this call has only a part, is kept, and so is
  // the delta of such a row's out. A caller that does not say so is recognised where that lse is higher than the scores
  // explain.
  void take_again(const Head<T>& head, std::int64_t i, const Vector<T>& dout, RowSoftmax& saved) const {
    const Softmax own(row_, head.sink());
    const double given = saved.lse - own.highest;
    saved.reference = own.highest;
    saved.lse = given;
    const double roundings = problem_.lse.dtype() == DType::f64 ? 0x1p-46 : 0x1p-17;
    if (problem_.of_longer_rows ||
        given > std::log(own.total) + roundings * (score_size(head, i) + std::fabs(own.highest)) + 0x1p-6) {
      return;
    }
    saved.lse = std::log(own.total);
    Sum delta;
    for (const Scored& scored : row_) {
      delta.add(saved.weight(scored.score) * grad_weight(head, i, scored.key, dout));
    }
    saved.delta = delta.value();
  }

  // The largest scale * sum |q k| of the row, which the rounding errors of an engine's scores are relative to.
  double score_size(const Head<T>& head, std::int64_t i) const {
    double largest = 0;
    for (const Scored& scored : row_) {
      const Vector<T> q = head.query(i), k = head.key(scored.key);
      double sum = 0;
      for (std::int64_t d = 0; d < problem_.head_dim; ++d) {
        sum += std::fabs(q[d] * k[d]);
      }
      largest = std::fmax(largest, std::fabs(problem_.scale) * sum);
    }
    return largest;
  }

  // dp(i, j), after dropout
  double grad_weight(const Head<T>& head, std::int64_t i, std::int64_t j, const Vector<T>& dout) const {
    return head.dropout_factor(i, j) * dot(dout, head.value(j), problem_.value_dim);
  }

  void differentiate_pair(const Head<T>& head, std::int64_t b, std::int64_t h, std::int64_t i, const Scored& scored,
                          const Vector<T>& dout, const RowSoftmax& softmax) {
    const std::int64_t j = scored.key;
    const double p = softmax.weight(scored.score);
    const double factor = head.dropout_factor(i, j);
    Sum* dv = dv_.data() + j * problem_.value_dim;
    for (std::int64_t d = 0; d < problem_.value_dim; ++d) {
      dv[d].add(p * factor * dout[d]);
    }
    const double ds = p * (grad_weight(head, i, j, dout) - softmax.delta);
    dbias_.add(b, h, i, j, ds);
    const double dx = problem_.scale * ds * scored.cap_slope;
    const Vector<T> q = head.query(i);
    const Vector<T> k = head.key(j);
    Sum* dk = dk_.data() + j * problem_.head_dim;
    for (std::int64_t d = 0; d < problem_.head_dim; ++d) {
      dq_[static_cast<std::size_t>(d)].add(dx * k[d]);
      dk[d].add(dx * q[d]);
    }
  }

  static void store_vector(const TensorView& view, std::int64_t b, std::int64_t h, std::int64_t row, const Sum* values,
                           std::int64_t size) {
    T* target = static_cast<T*>(view.data()) + row_offset(view, b, h, row);
    for (std::int64_t d = 0; d < size; ++d) {
      target[d * view.stride(3)] = converted<T>(values[d].value());
    }
  }

  void store_keys(std::int64_t b, std::int64_t g) {
    const Sequence current = sequence(problem_, b);
    for (std::int64_t j = 0; j < current.key_count; ++j) {
      const std::int64_t row = current.key_begin + j;
      if (problem_.dk) {
        store_vector(*problem_.dk, b, g, row, dk_.data() + j * problem_.head_dim, problem_.head_dim);
      }
      if (problem_.dv) {
        store_vector(*problem_.dv, b, g, row, dv_.data() + j * problem_.value_dim, problem_.value_dim);
      }
    }
  }

  void store_sums() {
    dbias_.store();
    for (std::int64_t h = 0; problem_.dsinks && h < problem_.heads; ++h) {
      store_float(*problem_.dsinks, h * problem_.dsinks->stride(0), dsinks_[static_cast<std::size_t>(h)].value());
    }
  }

  const BackwardProblem& problem_;
  std::vector<Scored> row_;
  BiasGradient dbias_;
  std::vector<Sum> dk_, dv_;  // [Sk, D], [Sk, Dv] of one kv head
  std::vector<Sum> dq_;       // [D] of one row
  std::vector<Sum> dsinks_;   // [H]
};

}  // namespace

void backward(const BackwardProblem& problem) {
  with_float_type(problem.dtype(), [&](auto type) { Backward<decltype(type)>(problem).run(); });
}

double backward_scratch(const Problem& problem) {
  const auto keys = static_cast<double>(problem.key_len);
  const double sums = keys * static_cast<double>(problem.head_dim + problem.value_dim) * sizeof(Sum);
  const double dbias = problem.bias ? static_cast<double>(problem.bias->elements()) * sizeof(Sum) : 0.0;
  return sums + dbias + keys * sizeof(Scored);
}

}  // namespace headway::reference
