#include "distributed/part.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/ceil_div.h"
#include "core/elements.h"
#include "core/engine.h"
#include "core/key_range.h"
#include "core/spans.h"
#include "distributed/global_problem.h"
#include "distributed/row_math.h"
#include "distributed/rows.h"

namespace headway::distributed {
namespace {

// One engine's call inside a part: batch items [first, last) with one offset, or some packed sequences.
struct Piece {
  Rows batch;          // packed: sequence numbers
  Rows queries, keys;  // of the whole
  bool packed = false;
};

// Batch items with the same offset share a call.
std::vector<Piece> dense_pieces(const Problem& whole, const Part& part) {
  std::vector<Piece> pieces;
  std::int64_t last_offset = 0;
  for (std::int64_t b = 0; b < whole.batch; ++b) {
    const std::int64_t offset = sequence(whole, b).offset;
    if (!pieces.empty() && offset == last_offset) {
      pieces.back().batch.end = b + 1;
    } else {
      pieces.push_back({{b, b + 1}, part.queries, part.keys});
    }
    last_offset = offset;
  }
  return pieces;
}

// Sequences that are completely inside the part share packed calls; each sequence that is cut has its own call.
std::vector<Piece> packed_pieces(const Problem& whole, const Part& part) {
  std::vector<Piece> pieces;
  for (std::int64_t b = 0; b < whole.batch; ++b) {
    const Sequence current = sequence(whole, b);
    const Rows queries = {current.query_begin, current.query_begin + current.query_count};
    const Rows keys = {current.key_begin, current.key_begin + current.key_count};
    const Rows queries_here = overlap(queries, part.queries);
    Rows keys_here = overlap(keys, part.keys);
    if (keys_here.count() <= 0) {
      keys_here = {part.keys.begin, part.keys.begin};
    }
    // A row without keys still has its sink.
    if (queries_here.count() <= 0 || (keys_here.count() == 0 && !whole.sinks)) {
      continue;
    }
    const bool inside = queries_here == queries && keys_here == keys;
    if (inside && !pieces.empty() && pieces.back().packed && pieces.back().queries.end == queries.begin &&
        pieces.back().keys.end == keys.begin) {
      pieces.back().batch.end = b + 1;
      pieces.back().queries.end = queries.end;
      pieces.back().keys.end = keys.end;
    } else {
      pieces.push_back({{b, b + 1}, queries_here, keys_here, inside});
    }
  }
  return pieces;
}

// The Problem of a piece, with the small arrays that it views.
class PieceProblem {
 public:
  PieceProblem(const Whole& whole, const Part& part, const Piece& piece) : whole_(whole), part_(part), piece_(piece) {
    problem = whole.problem;
    problem.query = rows_of(part.query, query_rows());
    problem.key = rows_of(part.key, key_rows());
    problem.value = rows_of(part.value, key_rows());
    problem.batch = piece.batch.count();
    problem.origin.batch = piece.batch.begin;
    piece.packed ? place_packed() : place_cut();
  }
  PieceProblem(const PieceProblem&) = delete;
  PieceProblem& operator=(const PieceProblem&) = delete;

  // Of a view over the part's rows.
  Rows query_rows() const { return relative(piece_.queries, part_.queries); }
  Rows key_rows() const { return relative(piece_.keys, part_.keys); }
  template <class View>
  View rows_of(const View& view, Rows rows) const {
    View slice = view.slice(2, rows.begin, rows.end);
    if (!whole_.problem.packed()) {
      return slice.slice(0, piece_.batch.begin, piece_.batch.end);
    }
    Dims sizes = slice.sizes();
    sizes[0] = piece_.batch.count();
    return slice.expand(sizes);
  }

  // The piece's part of a matrix with the axes of the mask or bias, whole or this rank's; axes of size 1 stay.
  template <class View>
  View part_of(View matrix, bool own) const {
    const Rows rows = own ? shifted(query_rows(), part_.first_row) : queries_inside_;
    const Rows axes[] = {piece_.batch, {0, matrix.size(1)}, rows, own ? piece_.keys : keys_inside_};
    for (int axis = 0; axis < 4; ++axis) {
      if (matrix.size(axis) != 1) {
        matrix = matrix.slice(axis, axes[axis].begin, axes[axis].end);
      }
    }
    return matrix;
  }

  Problem problem;

 private:
  static Rows shifted(Rows rows, std::int64_t by) { return {rows.begin + by, rows.end + by}; }
  static Rows relative(Rows rows, Rows to) { return shifted(rows, -to.begin); }

  void place_packed() {
    problem.query_len = problem.key_len = 0;
    for (std::int64_t b = piece_.batch.begin; b < piece_.batch.end; ++b) {
      const Sequence current = sequence(whole_.problem, b);
      starts_q_.push_back(current.query_begin - piece_.queries.begin);
      starts_k_.push_back(current.key_begin - piece_.keys.begin);
      problem.query_len = std::max(problem.query_len, current.query_count);
      problem.key_len = std::max(problem.key_len, current.key_count);
    }
    starts_q_.push_back(piece_.queries.count());
    starts_k_.push_back(piece_.keys.count());
    problem.cu_seqlens_q = ConstTensorView(starts_q_, {starts_q_.size()});
    problem.cu_seqlens_k = ConstTensorView(starts_k_, {starts_k_.size()});
    queries_inside_ = {0, problem.query_len};
    keys_inside_ = {0, problem.key_len};
    if (problem.spans) {
      problem.spans = problem.spans->slice(0, piece_.batch.begin, piece_.batch.end)
                          .slice(2, piece_.queries.begin, piece_.queries.end);
    }
    cut_matrices();
    if (problem.valid_lens) {
      const Dims sizes = {problem.batch, problem.query_len};
      problem.valid_lens = problem.valid_lens->slice(0, piece_.batch.begin, piece_.batch.end)
                               .slice(1, 0, problem.query_len)
                               .expand(sizes);
    }
    if (problem.query_lens) {
      problem.query_lens = problem.query_lens->slice(0, piece_.batch.begin, piece_.batch.end);
    }
  }

  void place_cut() {
    problem.cu_seqlens_q.reset();
    problem.cu_seqlens_k.reset();
    problem.query_len = piece_.queries.count();
    problem.key_len = piece_.keys.count();
    const Sequence first = sequence(whole_.problem, piece_.batch.begin);
    const std::int64_t row = piece_.queries.begin - first.query_begin;  // inside the sequence
    const std::int64_t key = problem.key_len > 0 ? piece_.keys.begin - first.key_begin : 0;
    queries_inside_ = {row, row + problem.query_len};
    keys_inside_ = {key, key + problem.key_len};
    problem.offset = first.offset + row - key;
    problem.origin.query = row;
    problem.origin.key = key;
    if (problem.valid_lens) {
      cut_valid_lens(row, key);
    }
    if (problem.query_lens) {
      for (std::int64_t b = piece_.batch.begin; b < piece_.batch.end; ++b) {
        const std::int64_t real = sequence(whole_.problem, b).real_queries;
        query_lens_.push_back(std::clamp<std::int64_t>(real - row, 0, problem.query_len));
      }
      problem.query_lens = ConstTensorView(query_lens_, {query_lens_.size()});
    }
    if (problem.spans) {
      cut_spans(first);
    }
    cut_matrices();
  }

  void cut_matrices() {
    const auto cut = [&](std::optional<ConstTensorView>& target, const std::optional<ConstTensorView>& own) {
      if (own || target) {
        const Dims sizes = {problem.batch, problem.heads, problem.query_len, problem.key_len};
        target = part_of(own ? *own : *target, own.has_value()).expand(sizes);
      }
    };
    cut(problem.mask, whole_.own_mask);
    cut(problem.bias, whole_.own_bias);
  }

  // The spans inside the piece's keys, counted from the first of them, in the normal form of core/spans.h.
  void cut_spans(const Sequence& first) {
    const Problem& whole = whole_.problem;
    const ConstTensorView& spans = *whole.spans;
    const auto stored = [&](int axis, std::int64_t size) { return spans.stride(axis) == 0 ? 1 : size; };
    problem.span_rows = queries_inside_.begin % whole.span_rows == 0 ? whole.span_rows : 1;
    const std::int64_t entries = ceil_div(problem.query_len, problem.span_rows);
    const std::int64_t batch = stored(0, problem.batch), heads = stored(1, problem.heads);
    spans_ = Tensor({batch, heads, entries, spans.size(3), 2}, DType::i64);
    const KeyRange keys = {keys_inside_.begin, keys_inside_.end};
    auto* target = spans_.as<std::int64_t>();
    for (std::int64_t n = 0; n < batch * heads * entries; ++n, target += 2 * spans.size(3)) {
      const std::int64_t row = queries_inside_.begin + n % entries * problem.span_rows;
      const std::int64_t head = n / entries;
      std::int64_t* next = target;
      for_spans_inside(whole, piece_.batch.begin + head / heads, head % heads, span_entry(whole, first, row), keys,
                       [&](const KeyRange& part) {
                         *next++ = part.begin - keys.begin;
                         *next++ = part.end - keys.begin;
                       });
    }
    problem.spans = ConstTensorView(spans_).expand({problem.batch, problem.heads, entries, spans.size(3), 2});
  }

  void cut_valid_lens(std::int64_t row, std::int64_t key) {
    const std::int64_t rows = problem.valid_lens_per_batch ? 1 : problem.query_len;
    for (std::int64_t b = piece_.batch.begin; b < piece_.batch.end; ++b) {
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t valid = valid_length(whole_.problem, b, problem.valid_lens_per_batch ? 0 : row + i);
        valid_lens_.push_back(std::clamp<std::int64_t>(valid - key, 0, problem.key_len));
      }
    }
    problem.valid_lens = ConstTensorView(valid_lens_, {problem.batch, rows}).expand({problem.batch, problem.query_len});
  }

  const Whole& whole_;
  const Part& part_;
  const Piece& piece_;
  Rows queries_inside_, keys_inside_;  // counted inside the sequences of a packed piece, or inside the one that is cut
  std::vector<std::int64_t> starts_q_, starts_k_, valid_lens_, query_lens_;
  Tensor spans_;
};

std::vector<Piece> pieces_of(const Problem& whole, const Part& part) {
  return whole.packed() ? packed_pieces(whole, part) : dense_pieces(whole, part);
}

// Whether every row of the part belongs to a piece, and so to an engine's call. Pieces never overlap.
bool covers(const std::vector<Piece>& pieces, Rows Piece::*side, Rows of_part) {
  std::int64_t rows = 0;
  for (const Piece& piece : pieces) {
    rows += (piece.*side).count();
  }
  return rows == of_part.count();
}

void fill(TensorView view, double value) {
  Tensor number({}, view.dtype());
  store_float(number.view(), 0, value);
  copy(ConstTensorView(number.view()).expand(view.sizes()), view);
}

}  // namespace

Whole Whole::of_heads(Rows heads, Rows kv_heads) const {
  Whole result = *this;
  const auto pick = [&](std::optional<ConstTensorView>& per_head, int axis) {
    if (per_head) {
      per_head = per_head->slice(axis, heads.begin, heads.end);
    }
  };
  pick(result.problem.alibi_slopes, 0);
  pick(result.problem.sinks, 0);
  pick(result.problem.spans, 1);
  pick(result.problem.mask, 1);
  pick(result.problem.bias, 1);
  result.problem.origin.head += heads.begin;
  result.problem.heads = heads.count();
  result.problem.kv_heads = kv_heads.count();
  return result;
}

void forward_part(const Whole& whole, const Part& part, TensorView out, TensorView lse) {
  const std::vector<Piece> pieces = pieces_of(whole.problem, part);
  if (whole.problem.packed() && !covers(pieces, &Piece::queries, part.queries)) {  // sequences without a key here
    fill(out, 0);
    fill(lse, -std::numeric_limits<double>::infinity());
  }
  for (const Piece& piece : pieces) {
    const PieceProblem of_piece(whole, part, piece);
    ForwardProblem problem;
    static_cast<Problem&>(problem) = of_piece.problem;
    problem.pass = Pass::forward;  // also of a backward call's part
    problem.out = of_piece.rows_of(out, of_piece.query_rows());
    problem.lse = of_piece.rows_of(lse, of_piece.query_rows());
    problem.wants_lse = true;
    run(problem, &EngineBase::forward);
  }
}

void forward_part_of_rows(const Whole& whole, const Part& part, TensorView out, TensorView lse) {
  forward_part(whole, part, out, lse);
  std::vector<Dims> not_a_number;  // the rows' indices in lse
  for (std::int64_t b = 0; b < lse.size(0); ++b) {
    for (std::int64_t h = 0; h < lse.size(1); ++h) {
      for (std::int64_t i = 0; i < lse.size(2); ++i) {
        if (std::isnan(load_float(lse, b * lse.stride(0) + h * lse.stride(1) + i * lse.stride(2)))) {
          not_a_number.push_back({b, h, i});
        }
      }
    }
  }
  if (not_a_number.empty()) {
    return;
  }
  // Beside the finite score of a sink, rows of -inf alone are finite. NaN and +inf still give NaN.
  const Tensor sinks({whole.problem.heads}, DType::f64);
  Whole with_sinks = whole;
  with_sinks.problem.sinks = sinks;
  Tensor beside_sink = Tensor::uninitialized(out.sizes(), out.dtype());
  Tensor lse_beside_sink = Tensor::uninitialized(lse.sizes(), lse.dtype());
  forward_part(with_sinks, part, beside_sink, lse_beside_sink);
  for (const Dims& row : not_a_number) {
    const auto of_row = [&](auto view) { return view.select(0, row[0]).select(0, row[1]).select(0, row[2]); };
    if (!std::isnan(load_float(of_row(lse_beside_sink.view()), 0))) {
      copy(of_row(beside_sink.view()), of_row(out));
      store_float(of_row(lse), 0, lowest_lse(lse.dtype()));
    }
  }
}

void backward_part(const Whole& whole, const Part& part, ConstTensorView grad_out, ConstTensorView out,
                   ConstTensorView lse, const PartGradients& gradients) {
  const std::vector<Piece> pieces = pieces_of(whole.problem, part);
  if (whole.problem.packed() && !covers(pieces, &Piece::queries, part.queries)) {
    fill(gradients.dq, 0);
  }
  if (whole.problem.packed() && !covers(pieces, &Piece::keys, part.keys)) {
    fill(gradients.dk, 0);
    fill(gradients.dv, 0);
  }
  for (const Piece& piece : pieces) {
    const PieceProblem of_piece(whole, part, piece);
    BackwardProblem problem;
    static_cast<Problem&>(problem) = of_piece.problem;
    problem.pass = Pass::backward;
    problem.of_longer_rows = part.of_longer_rows;
    const Rows queries = of_piece.query_rows(), keys = of_piece.key_rows();
    problem.grad_out = of_piece.rows_of(grad_out, queries);
    problem.out = of_piece.rows_of(out, queries);
    problem.lse = of_piece.rows_of(lse, queries);
    problem.dq = of_piece.rows_of(gradients.dq, queries);
    problem.dk = of_piece.rows_of(gradients.dk, keys);
    problem.dv = of_piece.rows_of(gradients.dv, keys);
    if (!gradients.bias_sums) {
      run(problem, &EngineBase::backward);
      continue;
    }
    const TensorView sums = of_piece.part_of(*gradients.bias_sums, whole.own_bias.has_value());
    Tensor dbias = Tensor::uninitialized(sums.sizes(), problem.dtype() == DType::f64 ? DType::f64 : DType::f32);
    problem.dbias = dbias;
    run(problem, &EngineBase::backward);
    add_rows(dbias, sums);
  }
}

}  // namespace headway::distributed
