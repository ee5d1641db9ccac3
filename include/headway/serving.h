// Serving: attention over keys and values in pages, as a server keeps them for many sequences of any lengths.
//
// Token j of sequence b is in slot j % page_size of page block_table(b, j / page_size). Sequences may share pages; a
// result is, bit for bit on the CPU, what attention gives on the keys and values gathered into one tensor, alone or in
// any batch. docs/contract.md has every rule, and the error bound of 8-bit pages.
#pragma once

#include <optional>

#include "headway/attention.h"
#include "headway/cxx20.h"

#pragma GCC visibility push(default)
namespace headway {

// The keys and values of B sequences. Pages may have any strides, and value_pages may be a view of key_pages' own
// memory (multi-head latent attention stores its values as the first columns of its keys).
struct PagedKeys {
  ConstTensorView key_pages;    // [pages, page_size, Hkv, D]
  ConstTensorView value_pages;  // [pages, page_size, Hkv, Dv]
  // i32 or i64 [B, max_pages]. Entries after a sequence's last page are never read, and the contents of unused slots
  // never affect a result.
  ConstTensorView block_table;
  ConstTensorView lengths;  // i32 or i64 [B]: the keys of each sequence
  // 8-bit pages (i8, f8e4m3): f32 [pages, page_size, Hkv], one scale for each token and head. An element then stands
  // for the float32 number scale * element, and the query, f32, bf16 or f16, is converted to float32 too.
  std::optional<ConstTensorView> key_scales = {};
  std::optional<ConstTensorView> value_scales = {};
};

// query [B,H,Sq,D], out [B,H,Sq,Dv], lse [B,H,Sq]. The queries are the last tokens of their sequences: row i of Sq
// is at the position of key length - Sq + i, and by default sees the keys up to there. With Causal::none it sees all.
// The options mask, bias and dropout are refused; so are weights, whose shape would differ between sequences.
void attention_paged(ConstTensorView query, const PagedKeys& keys, TensorView out,
                     const AttentionOptions& options = {.causal = Causal::bottom_right},
                     const AttentionOutputs& outputs = {});
Tensor attention_paged(ConstTensorView query, const PagedKeys& keys,
                       const AttentionOptions& options = {.causal = Causal::bottom_right},
                       const AttentionOutputs& outputs = {});

// Packed queries, so that sequences with many queries (prefill) and with one (decode) share a call: query
// [total_q,H,D], out [total_q,H,Dv], lse [H,total_q]; the queries of sequence b are rows cu_seqlens_q[b] to
// cu_seqlens_q[b+1].
void attention_paged(ConstTensorView query, ConstTensorView cu_seqlens_q, const PagedKeys& keys, TensorView out,
                     const AttentionOptions& options = {.causal = Causal::bottom_right},
                     const AttentionOutputs& outputs = {});
Tensor attention_paged(ConstTensorView query, ConstTensorView cu_seqlens_q, const PagedKeys& keys,
                       const AttentionOptions& options = {.causal = Causal::bottom_right},
                       const AttentionOutputs& outputs = {});

// What attention_paged would run and why; runs nothing. Packed queries need cu_seqlens_q.
Plan explain_paged(ConstTensorView query, const PagedKeys& keys,
                   const AttentionOptions& options = {.causal = Causal::bottom_right},
                   const ExplainRequest& request = {});
Plan explain_paged(ConstTensorView query, ConstTensorView cu_seqlens_q, const PagedKeys& keys,
                   const AttentionOptions& options = {.causal = Causal::bottom_right},
                   const ExplainRequest& request = {});

}  // namespace headway
#pragma GCC visibility pop
