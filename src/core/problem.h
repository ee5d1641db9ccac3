// One attention call as plain data: views in one logical order, resolved options, the outputs asked for. Everything an
// engine reads about a call is here; validate.h makes Problems, and only valid ones.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "core/dropout.h"
#include "headway/attention.h"

namespace headway {

enum class Pass : std::uint8_t { forward, backward, scores };

// Keys and values in pages (headway/serving.h): token j of sequence b lies in slot j % size of page table[b][j / size].
struct Pages {
  std::int64_t size = 0;                                    // slots of a page
  ConstTensorView table;                                    // integers [B, pages of a sequence]
  ConstTensorView lengths;                                  // integers [B]: keys of each sequence
  std::optional<ConstTensorView> key_scales, value_scales;  // f32 [pages, Hkv, size], of 8-bit pages
};

// Where a part cut from a longer call begins in the whole: dropout draws by positions of the whole. The CPU and
// reference engines read it; only calls in host memory are cut (src/distributed).
struct Origin {
  std::int64_t batch = 0, head = 0, query = 0, key = 0;

  bool operator==(const Origin&) const = default;
};

// The scale that calls have by default.
inline double natural_scale(std::int64_t head_dim) {
  return head_dim > 0 ? 1.0 / std::sqrt(static_cast<double>(head_dim)) : 1.0;
}

struct Problem {
  std::string_view operation;  // what the user called, for error texts
  Pass pass = Pass::forward;

  std::int64_t batch = 0;  // packed: the number of sequences
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t query_len = 0;  // where lengths_vary: of the longest sequence
  std::int64_t key_len = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;

  // [B,H,S,D]. Packed sequences share one long S axis: their batch stride is 0 and a Sequence says where each begins.
  ConstTensorView query, key, value;
  std::optional<ConstTensorView> cu_seqlens_q, cu_seqlens_k;  // in pages: the first alone, or none
  std::optional<Pages> pages;                                 // key and value are [pages,Hkv,slots,D] then

  // The key range of a row (see key_range.h).
  Causal causal = Causal::none;  // square has become top_left
  std::optional<std::int64_t> window_left, window_right;
  std::optional<ConstTensorView> valid_lens;  // [B,Sq], stride 0 over Sq where the user gave [B]
  bool valid_lens_per_batch = false;
  std::optional<ConstTensorView> query_lens;  // [B]
  // [B,H,entries,R,2], packed with total_q entries and batch stride 0. In host memory an entry's spans are in normal
  // form: ascending, with a gap between neighbours, empty ones last (see spans.h).
  std::optional<ConstTensorView> spans;
  std::int64_t span_rows = 1;                      // query rows of an entry
  std::shared_ptr<const Tensor> normalised_spans;  // what `spans` points to, where the user's needed a copy
  std::optional<std::int64_t> offset;              // of a part cut from a longer call; else it follows from the lengths

  // Score modifiers, in the order in which they apply.
  double scale = 1.0;
  std::optional<double> softcap;
  std::optional<ConstTensorView> bias;          // [B,H,Sq,Sk]
  std::optional<ConstTensorView> alibi_slopes;  // [H]
  std::optional<ConstTensorView> mask;          // [B,H,Sq,Sk]
  std::optional<ConstTensorView> sinks;         // [H]
  std::shared_ptr<const void> structured_mask;  // what spans and mask point to, where a structured mask made them
  Dropout dropout;
  Origin origin;

  bool wants_lse = false;
  bool wants_weights = false;
  Engine engine = Engine::automatic;  // what the user asked for
  Progress progress;
  void* stream = nullptr;  // a cudaStream_t
  bool batch_invariant = false;

  DType dtype() const { return query.dtype(); }
  DType key_dtype() const { return key.dtype(); }
  bool packed() const { return cu_seqlens_q.has_value(); }
  // Whether sequences have lengths of their own, which sequence() says.
  bool lengths_vary() const { return packed() || pages.has_value(); }
  // Query rows of one head over the whole call.
  std::int64_t query_rows() const { return packed() ? query.size(2) : batch * query_len; }
  std::int64_t kv_head(std::int64_t head) const { return head / (heads / kv_heads); }
};

struct ForwardProblem : Problem {
  static constexpr Pass own_pass = Pass::forward;
  TensorView out;                     // [B,H,Sq,Dv]
  std::optional<TensorView> lse;      // [B,H,Sq]
  std::optional<TensorView> weights;  // [B,H,Sq,Sk]
};

struct BackwardProblem : Problem {
  static constexpr Pass own_pass = Pass::backward;
  ConstTensorView grad_out, out;         // [B,H,Sq,Dv]
  ConstTensorView lse;                   // [B,H,Sq]
  std::optional<TensorView> dq, dk, dv;  // like query, key, value
  std::optional<TensorView> dbias;       // [B,H,Sq,Sk], or 1 for the axes to sum over
  std::optional<TensorView> dsinks;      // [H]
  // out and lse are of rows that have more keys (or a sink) than this call: lse says what the row's weights add up to,
  // and not the scores of this call.
  bool of_longer_rows = false;
};

struct ScoresProblem : Problem {
  static constexpr Pass own_pass = Pass::scores;
  Stage stage = Stage::weights;
  TensorView scores;  // [B,H,Sq,Sk]
};

}  // namespace headway
