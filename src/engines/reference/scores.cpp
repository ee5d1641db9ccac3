// The score matrix after a stage of the definition.
#include <vector>

#include "core/progress.h"
#include "engines/reference/head.h"
#include "engines/reference/passes.h"

namespace headway::reference {
namespace {

template <class T>
class Scores {
 public:
  explicit Scores(const ScoresProblem& problem) : problem_(problem) {}

  void run() {
    ProgressMeter meter(problem_.operation, problem_.progress, problem_.batch * problem_.heads * problem_.query_len);
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      for (std::int64_t h = 0; h < problem_.heads; ++h) {
        const Head<T> head(problem_, b, h);
        for (std::int64_t i = 0; i < problem_.query_len; ++i) {
          const bool before_masks = problem_.stage == Stage::scaled || problem_.stage == Stage::capped;
          before_masks ? store_products(head, i) : store_allowed(head, i);
          meter.advance();
        }
      }
    }
  }

 private:
  void store(const Head<T>& head, std::int64_t i, std::int64_t j, double value) {
    store_float(problem_.scores, head.matrix_offset(problem_.scores, i, j), value);
  }

  void store_products(const Head<T>& head, std::int64_t i) {
    for (std::int64_t j = 0; j < problem_.key_len; ++j) {
      const double scaled = head.scaled(i, j);
      store(head, i, j, problem_.stage == Stage::capped ? head.capped(scaled) : scaled);
    }
  }

  void store_allowed(const Head<T>& head, std::int64_t i) {
    const bool weights = problem_.stage == Stage::weights;
    for (std::int64_t j = 0; j < problem_.key_len; ++j) {
      store(head, i, j, weights ? 0.0 : -infinity);
    }
    head.score_row(i, row_);
    const Softmax softmax(row_, head.sink());
    for (const Scored& scored : row_) {
      store(head, i, scored.key, weights ? softmax.weight(scored) : scored.score);
    }
  }

  const ScoresProblem& problem_;
  std::vector<Scored> row_;
};

}  // namespace

void scores(const ScoresProblem& problem) {
  with_float_type(problem.dtype(), [&](auto type) { Scores<decltype(type)>(problem).run(); });
}

}  // namespace headway::reference
