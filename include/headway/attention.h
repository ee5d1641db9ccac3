// Scaled dot-product attention over views, its backward, and the score matrix on request.
//
// For each batch b, query head h, query position i, key position j, with the kv head g = h / (H / Hkv):
//   s(i,j) = scale * <q[b,h,i,:], k[b,g,j,:]>        then softcap * tanh(s / softcap), + bias, + alibi
//   lse(i) = log(sum over allowed j of exp(s) + exp(sink[h]))
//   out(i) = sum over allowed j of dropout(exp(s - lse)) * v[b,g,j,:]
// A row with no key allowed gives out 0 and lse -inf. docs/contract.md has every rule and edge case.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <vector>

#include "headway/cxx20.h"
#include "headway/masks.h"
#include "headway/plan.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

enum class Causal : std::uint8_t {
  none,
  square,        // top_left; an error unless Sq = Sk, where both alignments agree
  top_left,      // allows j <= i
  bottom_right,  // allows j <= i + offset: the last query sees the last key
};

// Allows i + offset - left <= j <= i + offset + right; a side without a number is unlimited.
struct Window {
  std::optional<std::int64_t> left = {};
  std::optional<std::int64_t> right = {};
};

// Called from time to time on the calling thread with the share of the work done, 0 to 1. If it returns false, the call
// throws Cancelled and leaves its outputs unfinished. CUDA work is only queued, so there it is called once, with 0.
using Progress = std::function<bool(double)>;

struct AttentionOptions {
  MaskOption mask = {};  // bool, broadcasts to [B,H,Sq,Sk]; true = attend. Or a structured mask (headway/masks.h)
  std::optional<ConstTensorView> bias = {};  // any float type, broadcasts to [B,H,Sq,Sk]; -inf forbids
  Causal causal = Causal::none;
  std::optional<Window> window = {};
  // Lengths may be in host memory even if the other tensors are on a device. Lengths on a device are not checked, since
  // reading them would wait for the device: the kernels clamp them to the legal range.
  std::optional<ConstTensorView> valid_lens = {};  // integers [B] or [B,Sq]: allows j < valid_lens
  std::optional<ConstTensorView> query_lens = {};  // integers [B]: rows i >= query_lens[b] are padding
  // Structured masks: row i may see key j if begin <= j < end for one of its R spans, and if all other masks allow it.
  // Integers [B|1,H|1,Sq,R,2] without the axes that the query lacks; packed: [1,H|1,total_q,R,2], counted inside the
  // sequence. Spans may be empty (begin = end), overlap and come in any order. In ascending order with gaps between
  // them and empty ones last, they are read in place; otherwise the call sorts a copy.
  std::optional<ConstTensorView> spans = {};
  // Query rows that share one entry of `spans`, whose Sq axis then has ceil(Sq / span_rows) entries. 1 when packed.
  std::int64_t span_rows = 1;
  std::optional<double> scale = {};                  // 1/sqrt(D) when absent
  std::optional<double> softcap = {};                // > 0
  std::optional<ConstTensorView> alibi_slopes = {};  // [H]: adds -slope * |i + offset - j|
  std::optional<ConstTensorView> sinks = {};         // [H]: one more score per row, without a value
  double dropout = 0.0;                              // in [0,1]; above 0 needs the seed
  std::optional<std::uint64_t> seed = {};
  Engine engine = Engine::automatic;
  Progress progress = {};
  // CUDA tensors: the cudaStream_t that the work is queued on (null: the default stream). The call returns before the
  // work is done; the memory that the views refer to must stay valid until then.
  void* stream = nullptr;
  // CUDA tensors: makes the bits of a batch item independent of the other items. On the CPU they always are.
  bool batch_invariant = false;
};

// Optional outputs of attention besides out.
struct AttentionOutputs {
  std::optional<TensorView> lse = {};      // [B,H,Sq], f64 for f64 inputs, f32 otherwise
  std::optional<TensorView> weights = {};  // [B,H,Sq,Sk] in the input type, before dropout
};

// The outputs of attention_backward; a gradient without a view is not computed.
struct AttentionGradients {
  std::optional<TensorView> dq = {};  // shapes and type of query, key, value
  std::optional<TensorView> dk = {};
  std::optional<TensorView> dv = {};
  std::optional<TensorView> dbias = {};   // the bias's own shape, any float type
  std::optional<TensorView> dsinks = {};  // [H], any float type
};

// query [B,H,Sq,D], key [B,Hkv,Sk,D], value [B,Hkv,Sk,Dv], out [B,H,Sq,Dv]. Also [B,S,D] (one head) and [S,D] (one
// head, one batch item); masks, biases, lse and weights then lack the same axes.
void attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out,
               const AttentionOptions& options = {}, const AttentionOutputs& outputs = {});

// The same with the result allocated: contiguous, of the query's type, on its device.
Tensor attention(ConstTensorView query, ConstTensorView key, ConstTensorView value,
                 const AttentionOptions& options = {}, const AttentionOutputs& outputs = {});

// The gradients of sum(grad_out * out), from the out and lse that attention wrote with the same options.
void attention_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                        ConstTensorView out, ConstTensorView lse, const AttentionGradients& gradients,
                        const AttentionOptions& options = {});

// Packed sequences: query [total_q,H,D], key [total_k,Hkv,D], value [total_k,Hkv,Dv], out [total_q,H,Dv], lse
// [H,total_q]. Sequence b is rows cu_seqlens[b] to cu_seqlens[b+1]; sequences never see each other. Masks and biases
// broadcast to [B,H,longest query,longest key] with positions counted inside a sequence.
void attention_varlen(ConstTensorView query, ConstTensorView key, ConstTensorView value, ConstTensorView cu_seqlens_q,
                      ConstTensorView cu_seqlens_k, TensorView out, const AttentionOptions& options = {},
                      const AttentionOutputs& outputs = {});

Tensor attention_varlen(ConstTensorView query, ConstTensorView key, ConstTensorView value, ConstTensorView cu_seqlens_q,
                        ConstTensorView cu_seqlens_k, const AttentionOptions& options = {},
                        const AttentionOutputs& outputs = {});

// Where sequences of these lengths begin and end in a pack: {3, 0, 5} gives [0, 3, 3, 8], i64. InvalidArgument for a
// negative length or a sum past 2^63.
Tensor cu_seqlens(std::span<const std::int64_t> lengths);
template <std::ranges::input_range Lengths>
requires std::integral<std::ranges::range_value_t<Lengths>> Tensor cu_seqlens(const Lengths& lengths) {
  std::vector<std::int64_t> wide;
  for (const auto length : lengths) {
    wide.push_back(Dims::Number(length).value);
  }
  return cu_seqlens(std::span<const std::int64_t>(wide));
}
inline Tensor cu_seqlens(std::initializer_list<std::int64_t> lengths) {
  return cu_seqlens(std::span(lengths.begin(), lengths.size()));
}

void attention_varlen_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key,
                               ConstTensorView value, ConstTensorView out, ConstTensorView lse,
                               ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k,
                               const AttentionGradients& gradients, const AttentionOptions& options = {});

// The matrix [B,H,Sq,Sk] after a stage of the definition.
enum class Stage : std::uint8_t {
  scaled,   // scale * <q,k>
  capped,   // after softcap
  biased,   // after bias and alibi, -inf where forbidden
  weights,  // after the softmax, 0 where forbidden
};

void attention_scores(ConstTensorView query, ConstTensorView key, TensorView scores, Stage stage = Stage::weights,
                      const AttentionOptions& options = {});

// The call to explain: attention, attention with these outputs, or its backward.
struct ExplainRequest {
  bool lse = false;
  bool weights = false;
  bool backward = false;
};

// What attention would run and why; runs nothing.
Plan explain(ConstTensorView query, ConstTensorView key, ConstTensorView value, const AttentionOptions& options = {},
             const ExplainRequest& request = {});

// The same for packed sequences.
Plan explain_varlen(ConstTensorView query, ConstTensorView key, ConstTensorView value, ConstTensorView cu_seqlens_q,
                    ConstTensorView cu_seqlens_k, const AttentionOptions& options = {},
                    const ExplainRequest& request = {});

}  // namespace headway
#pragma GCC visibility pop
