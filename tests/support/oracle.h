// Section 1 of the contract by direct softmax over the full matrix, forward and backward, in double (long double for
// f64 inputs); and the error bounds of section 3. Written from the contract, independently of every engine.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "headway/attention.h"
#include "support/array.h"

namespace headway::test {

// Philox4x32-10 as published by Salmon et al., 2011.
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

// One call as plain numbers, padded to rank 4: [B,H,Sq,D] and so on, of which item b uses rows[b] queries and keys[b]
// keys (all of them, unless the call is packed).
struct Spec {
  Array q, k, v;  // [B,H,Sq,D], [B,Hkv,Sk,D], [B,Hkv,Sk,Dv]
  std::vector<std::int64_t> rows, keys;
  std::optional<Array> mask, bias;           // rank 4, size 1 where they repeat
  std::optional<Array> valid_lens;           // [B] or [B,Sq]
  std::optional<Array> query_lens;           // [B]
  std::optional<Array> spans;                // [B|1,H|1,entries,R,2]; packed: [1,H|1,total_q,R,2]
  std::int64_t span_rows = 1;                // query rows of an entry
  std::vector<std::int64_t> span_begins;     // of each item: its first entry, where the call is packed
  std::optional<Array> alibi_slopes, sinks;  // [H]
  Causal causal = Causal::none;
  Window window;
  Real scale = 1;
  std::optional<double> softcap;
  double dropout = 0;
  std::uint64_t seed = 0;
  DType type = DType::f32;  // of q, k and v

  std::int64_t batch() const { return q.size(0); }
  std::int64_t heads() const { return q.size(1); }
  std::int64_t kv_heads() const { return k.size(1); }
  std::int64_t head_dim() const { return q.size(3); }
  std::int64_t value_dim() const { return v.size(3); }
};

// The sequence boundaries of a packed call.
struct Packing {
  std::vector<std::int64_t> starts_q, starts_k;

  std::int64_t batch() const { return static_cast<std::int64_t>(starts_q.size()) - 1; }
  std::int64_t longest_q() const;
  std::int64_t longest_k() const;
};

Spec spec_of(ConstTensorView q, ConstTensorView k, ConstTensorView v, const AttentionOptions& options);
Spec spec_of(ConstTensorView q, ConstTensorView k, ConstTensorView v, const Packing& packing,
             const AttentionOptions& options);

// [total,H,D] to [B,H,longest,D] and back; what no sequence covers is 0.
Array padded(const Array& packed, const std::vector<std::int64_t>& starts);
Array packed(const Array& padded, const std::vector<std::int64_t>& starts);
Array packed_lse(const Array& lse, const std::vector<std::int64_t>& starts);  // [B,H,longest] to [H,total]

// Whether every mask lets row i attend to key j.
bool allowed(const Spec& spec, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j);

// What dropout multiplies p(i,j) with: 0 or 1/(1-p).
Real kept(const Spec& spec, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j);

// A result with the scales that its error bound is made of, element by element.
struct Bounded {
  Array value;
  Array terms;     // the sum of the terms' absolute values
  Array weighted;  // the same with each term times L(i), which counts more where it comes near 1/unit
  Array limit;     // the largest absolute value that weights between 0 and 1, with a sum of at most 1, could give
};

struct Forward {
  Bounded out;
  Bounded weights;
  Bounded lse;
  Real largest_score = 0;  // the largest L(i)
};

struct Backward {
  Bounded dq, dk, dv;
  std::optional<Bounded> dbias, dsinks;
  Real largest = 0;  // of the sums of absolute terms on the way to a gradient
};

Forward forward(const Spec& spec);
Backward backward(const Spec& spec, const Array& grad_out);
struct ScoreMatrices;
// In little more than the time of one; and the scores as well, where they are asked for.
std::pair<Forward, Backward> both(const Spec& spec, const Array& grad_out, ScoreMatrices* scores = nullptr);

// The same formulas with every stored matrix rounded to the type, and dot products in f32 (f64 for f64): the eager
// implementation that section 3 compares with. Only the values are filled.
Backward eager_backward(const Spec& spec, const Array& grad_out, DType dtype);

// The score matrix after each stage; and the sums of the absolute values that a score is made of: |scale| sum |q k|,
// and that with |bias| + |alibi|.
struct ScoreMatrices {
  ScoreMatrices() = default;
  explicit ScoreMatrices(const Spec& spec);  // all 0
  Array scaled, capped, biased;
  Array products, magnitudes;
};
ScoreMatrices scores(const Spec& spec);

// Section 3's bound for each element of a result computed in `dtype`. `eager`, where given, holds the eager
// implementation's values: twice its error is then allowed on top.
enum class Kind : std::uint8_t { out, weights, lse, gradient };
Array error_bound(const Bounded& exact, Kind kind, DType dtype, const Array* eager = nullptr);

}  // namespace headway::test
