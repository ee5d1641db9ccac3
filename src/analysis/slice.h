// A part of an attention call as a problem of its own: one head of one batch item, some of its rows and keys.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/problem.h"
#include "headway/analysis.h"

namespace headway {

// Owns the lengths that its problem points to, so it cannot be moved. Half types are computed in f32, which represents
// them exactly.
class Slice {
 public:
  // `query` [rows,D] and `key` [keys,D] are those of the rectangle, both in the type to compute in.
  Slice(const Problem& whole, std::int64_t b, std::int64_t h, const Rectangle& part, ConstTensorView query,
        ConstTensorView key);
  Slice(const Slice&) = delete;
  Slice& operator=(const Slice&) = delete;

  const Problem& problem() const { return problem_; }

  // The weights [rows,keys] and lse [rows] of a slice that contains all keys.
  void weights(TensorView weights, TensorView lse) const;
  // The scores [rows,keys] after every modifier, -inf where forbidden.
  void scores(TensorView scores) const;

 private:
  void cut_spans(const Problem& whole, std::int64_t b, std::int64_t h, const Rectangle& part);

  Problem problem_;
  std::vector<std::int64_t> valid_lens_;  // one a row, counted from the first key of the slice
  std::vector<std::int64_t> spans_;       // [rows,R,2], counted from the first key of the slice
  std::int64_t query_lens_ = 0;           // real rows, counted from the first row of the slice
};

// The inputs of one head: its rows and keys in the type that the analysis computes in, converted if they are halves.
class HeadInputs {
 public:
  HeadInputs(const Problem& problem, std::int64_t b, std::int64_t h);

  ConstTensorView query;  // [Sq,D]
  ConstTensorView key;    // [Sk,D]

 private:
  Tensor converted_query_, converted_key_;
};

// The rows of a block whose weights are held at once.
std::int64_t rows_at_once(std::int64_t keys);

// The problem behind an analysis; dropout does not act on weights.
Problem analysis_problem(const char* operation, ConstTensorView query, ConstTensorView key,
                         const AttentionOptions& options);

// InvalidArgument unless the rectangle lies inside the matrix.
void check_rectangle(const Problem& problem, const Rectangle& rectangle);

}  // namespace headway
