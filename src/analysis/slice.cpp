#include "analysis/slice.h"

#include <algorithm>

#include "core/elements.h"
#include "core/engine.h"
#include "core/key_range.h"
#include "core/spans.h"
#include "core/text.h"
#include "core/validate.h"

namespace headway {
namespace {

// A view of one head of one batch item, as [1,1,..].
ConstTensorView head_of(const ConstTensorView& view, std::int64_t b, std::int64_t h) {
  return view.slice(0, b, b + 1).slice(1, h, h + 1);
}

ConstTensorView with_two_axes(const ConstTensorView& view) { return view.unsqueeze(0).unsqueeze(0); }

}  // namespace

Problem analysis_problem(const char* operation, ConstTensorView query, ConstTensorView key,
                         const AttentionOptions& options) {
  Problem problem =
      inputs_problem({.operation = operation, .query = query, .key = key, .options = options}, Pass::scores);
  problem.dropout = {};
  if (problem.query.device() != Device{}) {
    choose(problem);  // the error says why no engine takes it
  }
  return problem;
}

void check_rectangle(const Problem& problem, const Rectangle& rectangle) {
  const auto check = [&](const char* what, std::int64_t begin, std::int64_t end, std::int64_t size) {
    if (begin < 0 || begin > end || end > size) {
      throw InvalidArgument(
          text(problem.operation, ": ", what, " [", begin, ", ", end, ") must lie inside [0, ", size, ")"));
    }
  };
  check("rows", rectangle.row_begin, rectangle.row_end, problem.query_len);
  check("keys", rectangle.key_begin, rectangle.key_end, problem.key_len);
}

std::int64_t rows_at_once(std::int64_t keys) {
  constexpr std::int64_t elements = std::int64_t{1} << 22;  // 16 MiB of f32
  return std::clamp<std::int64_t>(elements / std::max<std::int64_t>(keys, 1), 16, 64);
}

HeadInputs::HeadInputs(const Problem& problem, std::int64_t b, std::int64_t h)
    : query(problem.query.select(0, b).select(0, h)), key(problem.key.select(0, b).select(0, problem.kv_head(h))) {
  if (size_of(problem.dtype()) == 2) {
    converted_query_ = convert(query, DType::f32);
    converted_key_ = convert(key, DType::f32);
    query = converted_query_;
    key = converted_key_;
  }
}

Slice::Slice(const Problem& whole, std::int64_t b, std::int64_t h, const Rectangle& part, ConstTensorView query,
             ConstTensorView key)
    : problem_(whole) {
  const Sequence sequence = headway::sequence(whole, b);
  const std::int64_t rows = part.row_end - part.row_begin, keys = part.key_end - part.key_begin;
  problem_.batch = problem_.heads = problem_.kv_heads = 1;
  problem_.query_len = rows;
  problem_.key_len = keys;
  problem_.value_dim = 0;
  problem_.query = with_two_axes(query);
  problem_.key = with_two_axes(key);
  problem_.value = ConstTensorView(nullptr, query.dtype(), {1, 1, keys, 0}, {0, 0, 0, 1});
  problem_.offset = sequence.offset + part.row_begin - part.key_begin;
  problem_.progress = {};

  if (whole.valid_lens) {
    for (std::int64_t i = part.row_begin; i < part.row_end; ++i) {
      const ConstTensorView& lens = *whole.valid_lens;
      const std::int64_t valid = load_integer(lens, b * lens.stride(0) + i * lens.stride(1));
      valid_lens_.push_back(std::clamp<std::int64_t>(valid - part.key_begin, 0, keys));
    }
    problem_.valid_lens = ConstTensorView(valid_lens_.data(), {1, rows});
    problem_.valid_lens_per_batch = false;
  }
  if (whole.query_lens) {
    query_lens_ = std::clamp<std::int64_t>(sequence.real_queries - part.row_begin, 0, rows);
    problem_.query_lens = ConstTensorView(&query_lens_, {1});
  }
  if (whole.spans) {
    cut_spans(whole, b, h, part);
  }
  const auto cut = [&](std::optional<ConstTensorView>& matrix) {
    if (matrix) {
      matrix = head_of(*matrix, b, h).slice(2, part.row_begin, part.row_end).slice(3, part.key_begin, part.key_end);
    }
  };
  cut(problem_.mask);
  cut(problem_.bias);
  const auto pick = [&](std::optional<ConstTensorView>& per_head) {
    if (per_head) {
      per_head = per_head->slice(0, h, h + 1);
    }
  };
  pick(problem_.alibi_slopes);
  pick(problem_.sinks);
}

void Slice::cut_spans(const Problem& whole, std::int64_t b, std::int64_t h, const Rectangle& part) {
  const std::int64_t rows = part.row_end - part.row_begin, count = whole.spans->size(3);
  spans_.assign(static_cast<std::size_t>(rows * count * 2), 0);
  for (std::int64_t i = 0; i < rows; ++i) {
    std::int64_t* row = spans_.data() + i * count * 2;
    for_spans_inside(whole, b, h, (part.row_begin + i) / whole.span_rows, {part.key_begin, part.key_end},
                     [&](const KeyRange& span) {
                       *row++ = span.begin - part.key_begin;
                       *row++ = span.end - part.key_begin;
                     });
  }
  problem_.spans = ConstTensorView(spans_.data(), {1, 1, rows, count, 2});
  problem_.span_rows = 1;
}

void Slice::weights(TensorView weights, TensorView lse) const {
  ForwardProblem forward;
  static_cast<Problem&>(forward) = problem_;
  forward.pass = Pass::forward;
  forward.out = TensorView(nullptr, problem_.dtype(), {1, 1, problem_.query_len, 0}, {0, 0, 0, 1});
  forward.weights = weights.unsqueeze(0).unsqueeze(0);
  forward.lse = lse.unsqueeze(0).unsqueeze(0);
  forward.wants_weights = forward.wants_lse = true;
  run(forward, &EngineBase::forward);
}

void Slice::scores(TensorView scores) const {
  ScoresProblem biased;
  static_cast<Problem&>(biased) = problem_;
  biased.stage = Stage::biased;
  biased.scores = scores.unsqueeze(0).unsqueeze(0);
  run(biased, &EngineBase::scores);
}

}  // namespace headway
