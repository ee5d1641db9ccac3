// Backward, row by row, from the saved out and lse:
//   p = exp(s - lse)      dv(j) += dropout(p) dout(i)      dp = dropout_factor <dout(i), v(j)>
//   ds = p (dp - delta)   with delta(i) = <dout(i), out(i)>; it is also the gradient of the bias
//   dx = ds * softcap'    dq(i) += scale dx k(j)           dk(j) += scale dx q(i)
//   dsink -= exp(sink - lse) delta
// Keys gather from many rows, and with grouped heads from several heads, in one fixed order.
#include <algorithm>
#include <vector>

#include "core/progress.h"
#include "engines/reference/head.h"
#include "engines/reference/passes.h"

namespace headway::reference {
namespace {

// Float64 sums for the gradient of a bias, which has size 1 along the axes to sum over.
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
      sums_[static_cast<std::size_t>(b * strides_[0] + h * strides_[1] + i * strides_[2] + j * strides_[3])] += value;
    }
  }

  void store() const {
    if (target_) {
      copy(ConstTensorView(sums_.data(), target_->sizes()), *target_);
    }
  }

 private:
  std::optional<TensorView> target_;
  Dims strides_;
  std::vector<double> sums_;
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
        std::fill(dk_.begin(), dk_.end(), 0.0);
        std::fill(dv_.begin(), dv_.end(), 0.0);
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
    std::fill(dq_.begin(), dq_.end(), 0.0);
    head.score_row(i, row_);
    const std::int64_t row = head.sequence().query_begin + i;
    if (!row_.empty()) {  // a row without keys has no gradient, and its grad_out is not read
      const Vector<T> dout = vector_at<T>(problem_.grad_out, b, h, row);
      const Vector<T> out = vector_at<T>(problem_.out, b, h, row);
      const double lse = load_float(problem_.lse, row_offset(problem_.lse, b, h, row));
      const double delta = dot(dout, out, problem_.value_dim);
      for (const Scored& scored : row_) {
        differentiate_pair(head, b, h, i, scored, dout, lse, delta);
      }
      if (head.sink()) {
        dsinks_[static_cast<std::size_t>(h)] -= std::exp(*head.sink() - lse) * delta;
      }
    }
    if (problem_.dq) {
      store_vector(*problem_.dq, b, h, row, dq_.data(), problem_.head_dim);
    }
  }

  void differentiate_pair(const Head<T>& head, std::int64_t b, std::int64_t h, std::int64_t i, const Scored& scored,
                          const Vector<T>& dout, double lse, double delta) {
    const std::int64_t j = scored.key;
    const double p = std::exp(scored.score - lse);
    const double factor = head.dropout_factor(i, j);
    double* dv = dv_.data() + j * problem_.value_dim;
    for (std::int64_t d = 0; d < problem_.value_dim; ++d) {
      dv[d] += p * factor * dout[d];
    }
    const double dp = factor * dot(dout, head.value(j), problem_.value_dim);
    const double ds = p * (dp - delta);
    dbias_.add(b, h, i, j, ds);
    const double dx = problem_.scale * ds * scored.cap_slope;
    const Vector<T> q = head.query(i);
    const Vector<T> k = head.key(j);
    double* dk = dk_.data() + j * problem_.head_dim;
    for (std::int64_t d = 0; d < problem_.head_dim; ++d) {
      dq_[static_cast<std::size_t>(d)] += dx * k[d];
      dk[d] += dx * q[d];
    }
  }

  static void store_vector(const TensorView& view, std::int64_t b, std::int64_t h, std::int64_t row,
                           const double* values, std::int64_t size) {
    T* target = static_cast<T*>(view.data()) + row_offset(view, b, h, row);
    for (std::int64_t d = 0; d < size; ++d) {
      target[d * view.stride(3)] = converted<T>(values[d]);
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
      store_float(*problem_.dsinks, h * problem_.dsinks->stride(0), dsinks_[static_cast<std::size_t>(h)]);
    }
  }

  const BackwardProblem& problem_;
  std::vector<Scored> row_;
  BiasGradient dbias_;
  std::vector<double> dk_, dv_;  // [Sk, D], [Sk, Dv] of one kv head
  std::vector<double> dq_;       // [D] of one row
  std::vector<double> dsinks_;   // [H]
};

}  // namespace

void backward(const BackwardProblem& problem) {
  with_float_type(problem.dtype(), [&](auto type) { Backward<decltype(type)>(problem).run(); });
}

double backward_scratch(const Problem& problem) {
  const auto keys = static_cast<double>(problem.key_len);
  const double sums = keys * static_cast<double>(problem.head_dim + problem.value_dim) * sizeof(double);
  const double dbias = problem.bias ? static_cast<double>(problem.bias->elements()) * sizeof(double) : 0.0;
  return sums + dbias + keys * sizeof(Scored);
}

}  // namespace headway::reference
