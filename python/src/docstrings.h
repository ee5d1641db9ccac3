// What help() says about the functions of the extension. Every example is run by tests/python/test_doctests.py.
#pragma once

namespace headway::python::docs {

inline constexpr const char* attention =
    R"(Scaled dot-product attention, softmax(scale * query key^T) value, with masks, biases and the other options below.

Shapes
    query  (B, H, Sq, D)     (B, Sq, D): one head each     (Sq, D): one head
    key    (B, Hkv, Sk, D)   (B, Sk, D)                    (Sk, D)
    value  (B, Hkv, Sk, Dv)  (B, Sk, Dv)                   (Sk, Dv)
    out    (B, H, Sq, Dv)    (B, Sq, Dv)                   (Sq, Dv)

Hkv divides H (grouped-query attention). The arrays are NumPy's or any with DLPack (torch, JAX, CuPy), float32, float64,
bfloat16 or float16, the same for all three; strided arrays are read in place. The result has the query's library and type.

Arrays on a CUDA device are computed there, on the current stream of their library, and the result stays there; the call
returns before the work is done. All of them must be on one device and of one library. valid_lens, query_lens, spans and
cu_seqlens may be in host memory, where they are checked; on the device they are not checked, but clamped to the legal range.

Which keys a query sees; all given options must allow a key
    mask          bool, broadcasts to (B, H, Sq, Sk): True = attend; or a structured mask of headway.masks
    causal        "top_left": j <= i; "bottom_right": the last query sees the last key; True: Sq must equal Sk
    window        (left, right): keys from i - left to i + right; None on a side = unlimited
    valid_lens    (B,) or (B, Sq) integers: the keys before that index
    query_lens    (B,) integers: the rows from that index on are padding and give 0
    spans         (B or 1, H or 1, Sq, R, 2) integers, without the axes that query lacks: row i sees the keys begin <= j < end
                  of its R spans, which may be empty, overlap and come in any order; nothing of size Sq x Sk is built
    span_rows     query rows that share one entry of spans, which then has ceil(Sq / span_rows) of them
How strongly
    scale         1/sqrt(D) when absent
    softcap       softcap * tanh(score / softcap)
    bias          floating, broadcasts like mask and is added; -inf forbids
    alibi_slopes  (H,): adds -slope * distance
    sinks         (H,): one more score in each row, without a value
    dropout       the share of weights to drop, needs seed (0 <= seed < 2**64); the same seed drops the same weights
What comes back
    return_weights, return_lse   a tuple (out[, weights][, lse]); weights (B, H, Sq, Sk) before dropout, lse (B, H, Sq)
    out           an array to write the result to, which is then also returned
    engine        "reference", "cpu" or "cuda"; by default the fastest that can run the call (see explain)
    batch_invariant   on a GPU too, the same bits whatever else is in the batch; on the CPU this is always so
    layout        "bshd": arrays with four axes, including out, are (B, S, H, D); masks, weights and lse stay as above

A query with no allowed key gives 0, never NaN. Torch tensors that require grad are refused while torch records
gradients, since this function records none.

>>> import numpy as np, headway
>>> query = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
>>> value = np.array([[1.0], [2.0], [4.0]])
>>> headway.attention(query, query, value, causal=True).round(3)
array([[1.   ],
       [1.67 ],
       [2.759]])
>>> out, lse = headway.attention(query, query, value, valid_lens=[0, 1, 3], return_lse=True)
>>> out.shape, lse.shape
((3, 1), (3,))
>>> out[0], lse[0]
(array([0.]), np.float64(-inf))
)";

inline constexpr const char* attention_backward =
    R"(The gradients of sum(grad_out * out), from the out and lse that attention returned with the same options.

Shapes
    grad_out, out  (B, H, Sq, Dv)
    lse            (B, H, Sq), from return_lse=True
    query, key, value and the options as for attention, without heads or batch too

    gradients      a Gradients of arrays to write to; those that are None are allocated

Returns Gradients: .query .key .value .bias .sinks, each with the shape and type of its input; .bias and .sinks are
None if the call has none. bias_gradient=False leaves .bias None too, and saves its computation.

>>> import numpy as np, headway
>>> rng = np.random.default_rng(0)
>>> query, key, value = rng.standard_normal((3, 2, 4, 5, 8))
>>> bias = np.zeros((4, 1, 5))
>>> out, lse = headway.attention(query, key, value, bias=bias, return_lse=True)
>>> headway.attention_backward(np.ones_like(out), query, key, value, out, lse, bias=bias)
Gradients(
  query=float64 (2, 4, 5, 8),
  key=float64 (2, 4, 5, 8),
  value=float64 (2, 4, 5, 8),
  bias=float64 (4, 1, 5),
  sinks=None)
)";

inline constexpr const char* attention_scores =
    R"(The matrix (B, H, Sq, Sk) after a stage of attention, in the input's type.

    "scaled"   scale * query key^T
    "capped"   after softcap
    "biased"   after bias and alibi_slopes, -inf where a key is forbidden
    "weights"  after the softmax, 0 where a key is forbidden; before dropout

query (B, H, Sq, D), key (B, Hkv, Sk, D), both without heads or batch too; options as for attention. Only this function and
return_weights store a matrix. out is an array to write it to.

>>> import numpy as np, headway
>>> query = np.array([[1.0, 0.0], [0.0, 2.0]])
>>> headway.attention_scores(query, query, stage="biased", scale=1, causal=True)
array([[  1., -inf],
       [  0.,   4.]])
>>> headway.attention_scores(query, query, causal=True).round(3)
array([[1.   , 0.   ],
       [0.056, 0.944]])
)";

inline constexpr const char* attention_varlen =
    R"(Attention over packed sequences that never see each other.

Shapes
    query         (total_q, H, D)     sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
    key           (total_k, Hkv, D)   and, of key and value, rows cu_seqlens_k[b] to cu_seqlens_k[b + 1]
    value         (total_k, Hkv, Dv)
    cu_seqlens_q  (B + 1,) integers from 0 to total_q, and cu_seqlens_k the same up to total_k
    out           (total_q, H, Dv)
    lse           (H, total_q)

Options as for attention, with positions counted inside a sequence: mask and bias broadcast to (B, H, longest query, longest
key), valid_lens and query_lens are (B,), spans (1, H or 1, total_q, R, 2).
Weights would differ in shape between sequences; requesting them is an error.

>>> import numpy as np, headway
>>> rows = np.random.default_rng(0).standard_normal((7, 2, 8))
>>> packed = headway.attention_varlen(rows, rows, rows, [0, 3, 7], [0, 3, 7], causal=True)
>>> alone = headway.attention(*3 * [rows[3:].swapaxes(0, 1)[None]], causal=True)
>>> np.array_equal(packed[3:].swapaxes(0, 1), alone[0])
True
)";

inline constexpr const char* attention_varlen_backward =
    R"(The gradients of sum(grad_out * out) for attention_varlen, from its out and lse with the same options.

Shapes
    grad_out, out  (total_q, H, Dv)
    lse            (H, total_q)
    the others as for attention_varlen

Returns Gradients, as attention_backward does.

>>> import numpy as np, headway
>>> rows = np.random.default_rng(0).standard_normal((7, 2, 8))
>>> starts = [0, 3, 7]
>>> out, lse = headway.attention_varlen(rows, rows, rows, starts, starts, return_lse=True)
>>> gradients = headway.attention_varlen_backward(np.ones_like(out), rows, rows, rows, out, lse, starts, starts)
>>> gradients.value.shape, gradients.bias is None
((7, 2, 8), True)
)";

inline constexpr const char* attention_paged =
    R"(Attention over keys and values in pages, as a server keeps them for many sequences of any lengths.

Shapes
    query         (B, H, Sq, D), or packed (total_q, H, D) with cu_seqlens_q (B + 1,)
    key_pages     (pages, page_size, Hkv, D)    any strides; value_pages may be a view of key_pages
    value_pages   (pages, page_size, Hkv, Dv)
    block_table   (B, max_pages) integers: token j of sequence b is in slot j % page_size of page block_table[b, j // page_size]
    lengths       (B,) integers: the keys of each sequence
    out           as query, with Dv
    key_scales, value_scales   (pages, page_size, Hkv) float32, for int8 and float8_e4m3fn pages: an element stands for
                  scale * element in float32

The queries are the last tokens of their sequences. causal is "bottom_right" by default: a query sees the keys up to its own;
False lets it see all of them. The other options as for attention. return_lse gives (out, lse (B, H, Sq), packed (H, total_q)).

Table entries after a sequence's last page are never read, and unused slots never affect a result. The result is what attention
gives on the keys and values gathered into one array, bit for bit on the CPU, alone or in any batch.

>>> import numpy as np, headway
>>> rng = np.random.default_rng(0)
>>> pages = rng.standard_normal((2, 6, 4, 1, 8), dtype=np.float32)  # 6 pages of 4 tokens, for keys and for values
>>> query = rng.standard_normal((2, 2, 1, 8), dtype=np.float32)
>>> out = headway.attention_paged(query, *pages, [[3, 0], [5, 1]], [6, 3])
>>> key, value = (each[[3, 0]].reshape(8, 1, 8)[:6].swapaxes(0, 1)[None] for each in pages)
>>> np.array_equal(out[:1], headway.attention(query[:1], key, value))
True
)";

inline constexpr const char* explain =
    R"(What attention(query, key, value, ...) would run, and why; runs nothing.

Takes attention's arguments, and backward=True to ask about attention_backward. print() the Plan for the readable text.

>>> import numpy as np, headway
>>> x = np.zeros((2, 4, 128, 64), np.float32)
>>> plan = headway.explain(x, x, x, causal=True, engine="reference")
>>> plan.engine, plan.pairs == 2 * 4 * 128 * 129 // 2, plan.flops == 2 * (64 + 64) * plan.pairs
('reference', True, True)
>>> print(plan)  # doctest: +ELLIPSIS
attention on the reference engine
  shapes   query (2, 4, 128, 64), key (2, 4, 128, 64), value (2, 4, 128, 64), f32
...
)";

inline constexpr const char* plan =
    R"(What one attention call would run, from explain(). print() it for the readable text.

    engine, operation, kernel, instruction_set   what runs
    shape, options                               on what
    query_block, key_block, tasks, threads       in which pieces
    pairs, all_pairs                             (query, key) pairs that are visited, and all of them
    flops, bytes, scratch_bytes                  work, memory moved, memory needed besides the results
    passed_over                                  [(engine, why not), ...]
    passed_kernels                               the same for kernels of the chosen engine: [(kernel, why not), ...]

>>> import numpy as np, headway
>>> x = np.zeros((1, 2, 16, 8), np.float32)
>>> plan = headway.explain(x, x, x, window=(4, 0), engine="reference")
>>> plan.options, plan.pairs, plan.all_pairs
('window (4, 0), scale 0.353553', 140, 512)
)";

inline constexpr const char* analyze =
    R"(Statistics of the attention weights of these queries and keys, without storing their matrix: exact at any length, in
memory that grows with the rows and keys only. Options as for attention; dropout is ignored.

Shapes
    query  (B, H, Sq, D)   key  (B, Hkv, Sk, D)     or fewer axes; the results lose the same ones
What is asked for
    top     the number of strongest keys to list for each row
    near    (left, right): the window around the diagonal whose weights are summed; None on a side = unlimited
    cells   along each side of the maps, at most 512; 0 for none
    progress  a progress line for a long analysis: True, False, or None for on a terminal only
What comes back (fields of the result)
    entropy      (B, H, Sq)        of each row's weights, natural logarithm
    distance     (B, H, Sq)        the mean distance between query and key
    first, diagonal, near          (B, H, Sq)  the weight of key 0, of the query's own position, inside near
    received     (B, H, Sk)        the sum of the weights that each key received
    top_keys, top_weights          (B, H, Sq, top)  the largest first; key -1 after the last weight that is not 0
    map_mean, map_max              (B, H, R, C)  over cells of row_cell x key_cell weights
    similarity   (B, H, H)         the cosine between the heads' mean maps
    lse          (B, H, Sq)        for weights_in
Arrays on a CUDA device are analyzed there, on their library's stream; results are in host memory, arrays of the same library if
it has host arrays (torch), else NumPy's, and the call returns when they have arrived.

>>> import numpy as np, headway
>>> x = np.eye(4)
>>> found = headway.analyze(x, x, scale=10.0, causal=True, top=1)
>>> found.top_keys[:, 0]
array([0, 1, 2, 3])
>>> bool(np.allclose(found.diagonal, 1.0, atol=1e-3))
True
)";

inline constexpr const char* weights_in =
    R"(The exact attention weights of some rows and keys: (B, H, rows, keys), or with fewer axes where query has fewer.

rows and keys are pairs (begin, end). With the lse of attention or analyze only the scores inside are computed; without
it, whole rows. Options as for attention; float32 for half types. From arrays on a CUDA device the weights are computed there
and are returned as analyze's results are; lse may be on the device or in host memory.

>>> import numpy as np, headway
>>> x = np.random.default_rng(0).standard_normal((100, 8))
>>> lse = headway.analyze(x, x).lse
>>> part = headway.weights_in(x, x, (10, 12), (95, 100), lse=lse)
>>> bool(np.allclose(part, headway.attention_scores(x, x)[10:12, 95:]))
True
)";

inline constexpr const char* mean_weights =
    R"(The mean of the attention weights over the heads: (B, Sq, Sk), or (Sq, Sk) where query has no batch; in query's type.

lse is what attention returned for the same query, key and options. No head's own matrix is stored. The result is where
query, key and lse are; on a CUDA device the work is queued on their library's stream.

>>> import numpy as np, headway
>>> x = np.random.default_rng(0).standard_normal((2, 4, 9, 8))
>>> out, weights, lse = headway.attention(x, x, x, return_weights=True, return_lse=True)
>>> bool(np.allclose(headway.mean_weights(x, x, lse), weights.mean(axis=1)))
True
)";

inline constexpr const char* mask =
    R"(Which keys a query may see, as a value: made by the functions of headway.masks, joined by & and |, and given to attention
as mask=. For given sizes it becomes a few spans of keys for each query; it keeps those of the sizes that it was last used with,
so that the layers of a model share them. str() draws it, at sizes of its own or at small ones; repr() is how it was made.

>>> from headway import masks
>>> mask = masks.first(1) | masks.window(2, 0)
>>> mask
first(1) | window(2, 0)
>>> print(mask.draw(5, 5))
first(1) | window(2, 0): 5 queries x 5 keys, 14 pairs, 56 %
■ · · · ·
■ ■ · · ·
■ ■ ■ · ·
■ ■ ■ ■ ·
■ · ■ ■ ■
>>> mask.pairs(5, 5), mask.pairs(100_000, 100_000)
(14, 399994)
>>> mask.to_bool(5, 5)[0, 0, 4]
array([ True, False,  True,  True,  True])
>>> array, rows = mask.spans(5, 5)  # up to two spans of keys for each query
>>> array[0, 0, 4], rows
(array([[0, 1],
       [2, 5]], dtype=int32), 1)
)";
inline constexpr const char* mask_batch = "The batch items that it tells apart; 1 where it is the same for all.";
inline constexpr const char* mask_heads = "The heads that it tells apart; 1 where it is the same for all.";
inline constexpr const char* mask_pairs =
    "How many pairs of a query and a key it allows, over its own batch items and heads.";
inline constexpr const char* mask_draw =
    "A drawing of its first batch item and head: a line about it, and a line for each query, or row of cells.";
inline constexpr const char* mask_to_bool = "The mask as bools (batch or 1, heads or 1, queries, keys), for tests.";
inline constexpr const char* mask_spans =
    R"(Its spans as integers (batch or 1, heads or 1, entries, spans, 2), and how many queries share an entry: what attention takes as spans= and
span_rows=. The spans of an entry are sorted and do not touch; empty ones come last. A mask with a dense part has none.)";

inline constexpr const char* trace =
    R"(The steps of attention as TraceData; headway.trace makes its Trace of it.
)";
inline constexpr const char* view_layer =
    "One call of attention for write_view and LiveView: query, key and the options.";

inline constexpr const char* write_view = "Writes the page; headway.view says what is in it.";

inline constexpr const char* live_view = "The answers of a server of the page; headway.view has the sockets.";

}  // namespace headway::python::docs
