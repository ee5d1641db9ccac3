"""What went wrong in other libraries of attention, by project and number of the report, and does not here."""

import ast
import pathlib
import re

import numpy as np
import pytest

import headway
import oracle
from bugs_support import check, draw
from cases import DTYPES, assert_close

HALVES = ["float16", "bfloat16"]


def test_every_test_of_others_bugs_names_its_report():
    reports = set()
    for file in pathlib.Path(__file__).parent.glob("test_bugs_of_others*.py"):
        for test in ast.parse(file.read_text()).body:
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_") and "every_test" not in test.name:
                found = re.findall(r"[\w.-]+#\d+", ast.get_docstring(test) or "")
                assert found, test.name
                reports |= {*found}
    assert len(reports) >= 40


# ---- Rows without a key ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_a_mask_leaves_no_key_gives_0_and_no_gradient_is_nan(dtype):
    """pytorch#103963, pytorch#41508: NaN from a softmax over nothing, in out or gradients."""
    mask = np.zeros((8, 8), bool)
    mask[:4, :4] = True
    out = check(*(draw(1, 2, 8, 8, seed=n, dtype=dtype) for n in range(3)), mask=mask)
    assert not out[:, :, 4:].any()


def test_a_row_whose_bias_is_the_lowest_float_everywhere_is_a_plain_mean():
    """pytorch#109517: a finite mask of -3.4e38 over a whole row gave NaN."""
    bias = np.zeros((5, 7), np.float32)
    bias[2] = np.finfo(np.float32).min
    value = draw(7, 3, seed=2)
    out = headway.attention(draw(5, 4), draw(7, 4, seed=1), value, bias=bias)
    np.testing.assert_allclose(out[2], value.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("queries, keys", [(2048 // 16, 1024 // 16), (300, 40)])
def test_more_queries_than_keys_aligned_at_their_ends(queries, keys):
    """flash-attention#1778: a negative block count left rows unwritten. Here the first rows have no key, and are 0."""
    query, key, value = draw(1, 2, queries, 16), draw(1, 2, keys, 16, seed=1), draw(1, 2, keys, 16, seed=2)
    out = check(query, key, value, causal="bottom_right")
    assert not out[:, :, : queries - keys].any() and out[:, :, queries - keys :].all()


def test_the_lse_of_a_row_without_a_key_is_minus_infinity():
    """flash-attention#978: +inf. flashinfer#4452: -49994, which merges as if it were a score."""
    query, key = draw(1, 2, 40, 8), draw(1, 2, 10, 8, seed=1)
    _, lse = headway.attention(query, key, key, causal="bottom_right", return_lse=True)
    assert np.isneginf(lse[:, :, :30]).all() and np.isfinite(lse[:, :, 30:]).all()
    _, lse = headway.attention(query, key[:, :, :0], key[:, :, :0], return_lse=True)
    assert np.isneginf(lse).all()


def test_sequences_of_length_0_in_a_batch_are_0():
    """pytorch#81077: NaN in items of length 0, which a random mask made."""
    query, key, value = (draw(6, 2, 9, 8, seed=n) for n in range(3))
    out = check(query, key, value, valid_lens=np.array([9, 0, 3, 0, 1, 9]))
    assert not out[[1, 3]].any()


# ---- Where a softmax begins ----


def test_one_key_with_a_very_negative_score_has_all_the_weight():
    """flashinfer#4451: scores below -5e4 were taken for forbidden, and gave 0 where the only key's value is due."""
    query, key, value = draw(1, 2, 1, 8), draw(1, 2, 1, 8, seed=1), draw(1, 2, 1, 4, seed=2)
    query[:], key[:] = 512.0, -128.0
    out, weights, lse = headway.attention(query, key, value, scale=1.0, return_weights=True, return_lse=True)
    assert np.array_equal(out, value)
    np.testing.assert_allclose(weights, 1, atol=1e-6)
    np.testing.assert_allclose(lse, -524288.0, rtol=2**-23)


def test_a_very_negative_lse_gives_no_nan_gradient():
    """pytorch#196678: exp(score - lse) overflowed in backward where all scores of a row are very negative."""
    for dtype, tolerance in (("float64", 1e3), ("float32", 1e3)):  # scores of 1e5 are rounded to 1e5 units
        query, key, value = (draw(1, 1, 4, 8, seed=n, dtype=dtype) for n in range(3))
        check(query, key, value, tolerance, bias=np.full((4, 4), -1e5, query.dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_query_s_gradient_of_a_single_key_is_0(dtype):
    """flash-attention#334: NaN in dq of a call with one query and one key in float16."""
    query, key, value = (draw(1, 1, 1, 16, seed=n, dtype=dtype) * DTYPES[dtype].type(3) for n in range(3))
    out, lse = headway.attention(query, key, value, return_lse=True)
    found = headway.attention_backward(np.ones_like(out), query, key, value, out, lse)
    assert not found.query.any() and not found.key.any() and (found.value == 1).all()


@pytest.mark.parametrize("keys", [300, 700])
def test_rows_whose_first_keys_are_all_forbidden_are_right(keys):
    """pytorch#127055, llama.cpp#12776: a block of -inf before the first allowed key made NaN of the running maximum."""
    bias = np.full((keys, keys), -np.inf, np.float32)
    for i in range(keys):
        bias[i, max(0, i - 9) : i + 1] = 0
    query, key, value = (draw(1, 1, keys, 2, seed=n) for n in range(3))
    check(query, key, value, bias=bias)


def test_scores_beyond_float16_are_not_rounded_to_it():
    """pytorch#60939: query and key of 256 overflow a half's product, and gave inf and NaN."""
    query, key = (draw(1, 1, 6, 128, seed=n, dtype="float16") * np.float16(64) for n in range(2))
    value = draw(1, 1, 6, 16, seed=2, dtype="float16")
    out = headway.attention(query, key, value)
    assert_close(out, oracle.attention(query, key, value).out, "float16")


def test_lse_is_the_natural_logarithm():
    """pytorch#181645: a backend returned lse in base 2."""
    _, lse = headway.attention(np.zeros((1, 8)), np.zeros((5, 8)), np.zeros((5, 8)), return_lse=True)
    np.testing.assert_allclose(lse, np.log(5), rtol=1e-15)


# ---- Masks ----


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_masked_position_holds_is_never_seen(bad, dtype):
    """pytorch#101967: NaN in a key or value that the mask forbids reached the output."""
    query, key, value = (draw(2, 2, 4, 8, seed=n, dtype=dtype) for n in range(3))
    mask = np.ones((4, 4), bool)
    mask[:, 1] = False
    clean = headway.attention(query, key, value, mask=mask)
    key[:, :, 1], value[:, :, 1] = bad, bad
    assert headway.attention(query, key, value, mask=mask).tobytes() == clean.tobytes()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_mask_over_halves_gives_no_nan(dtype):
    """flax#982: the mask's -1e10 became -inf in float16, and NaN."""
    query, key, value = (draw(2, 2, 9, 16, seed=n, dtype=dtype) for n in range(3))
    check(query, key, value, mask=np.tril(np.ones((9, 9), bool)))


def test_true_means_attend_and_nothing_else():
    """pytorch#170400, tensorflow-text#894: True means attend in one function and ignore in its neighbour."""
    query, key, value = (draw(1, 1, 5, 8, seed=n) for n in range(3))
    mask = np.eye(5, dtype=bool)
    np.testing.assert_array_equal(headway.attention(query, key, value, mask=mask), value)
    with pytest.raises(TypeError, match="mask has type i64, expected bool"):
        headway.attention(query, key, value, mask=mask.astype(np.int64))


def test_a_mask_of_three_axes_is_one_for_each_batch_item():
    """xformers#683: a bool mask (B, M, M) over (B, M, K) was refused with a question of strides."""
    query, key, value = (draw(32, 10, 16, seed=n) for n in range(3))
    check(query, key, value, mask=np.random.default_rng(3).random((32, 10, 10)) < 0.5)


def test_causal_and_a_padding_mask_hold_together():
    """onnxruntime#14363: two masks of -10000 added up, so that keys forbidden twice counted less than those once."""
    query, key, value = (draw(1, 13, 7, 37, seed=n) for n in range(3))
    mask = np.array([0, 1, 1, 0, 0, 1, 0], bool)
    out = check(query, key, value, mask=mask, causal=True)
    assert not out[:, :, 0].any()


def test_causal_acts_with_or_without_another_mask_and_whatever_is_returned():
    """xformers#103: skipped without a mask. keras#23038: dropped with dropout or returned scores."""
    query, key, value = (draw(1, 2, 6, 8, seed=n) for n in range(3))
    for more in ({}, {"mask": np.ones((6, 6), bool)}, {"dropout": 0.5, "seed": 1}):
        for wanted in (False, True):
            later = np.where(np.arange(6)[:, None] > 2, np.float32(np.nan), value)
            found = headway.attention(query, key, later, causal=True, return_weights=wanted, **more)
            out, weights = found if wanted else (found, None)
            assert np.isfinite(out[:, :, :3]).all()
            assert weights is None or not np.triu(weights, 1).any()


def test_causal_with_two_lengths_has_to_say_where_it_is_aligned():
    """pytorch#108108, pytorch#144858, flash-attention#402: one flag, two meanings where the lengths differ."""
    query, key = draw(1, 1, 4, 8), draw(1, 1, 6, 8, seed=1)
    with pytest.raises(ValueError, match="causal is ambiguous with 4 queries and 6 keys"):
        headway.attention(query, key, key, causal=True)
    for causal, offset in (("top_left", 0), ("bottom_right", 2)):
        _, weights = headway.attention(query, key, key, causal=causal, return_weights=True)
        assert np.array_equal(weights[0, 0] > 0, np.tril(np.ones((4, 6), bool), offset))


def test_a_window_as_long_as_the_sequence_is_causal_bit_for_bit():
    """flash-attention#1133: window (S - 1, 0) differed from causal."""
    query, key, value = (draw(1, 2, 300, 16, seed=n) for n in range(3))
    causal = headway.attention(query, key, value, causal=True)
    for left in (None, 300, 299):
        assert np.array_equal(headway.attention(query, key, value, window=(left, 0)), causal)


def test_a_window_counts_the_keys_beside_the_query_s_own():
    """transformers#39408, transformers#29623, zml#763: off by one between two libraries' windows."""
    query, key = draw(1, 1, 9, 4), draw(1, 1, 9, 4, seed=1)
    _, weights = headway.attention(query, key, key, window=(3, 1), return_weights=True)
    i, j = np.indices((9, 9))
    assert np.array_equal(weights[0, 0] > 0, (j >= i - 3) & (j <= i + 1))
    with pytest.raises(ValueError, match="window left is -3, expected 0 or more, or None"):
        headway.attention(query, key, key, window=(-3, 0))


def test_a_window_without_causal_over_fewer_queries_than_keys():
    """flashinfer#4972: wrong in the first tile of queries, which saw keys left of their window."""
    query, key, value = draw(1, 4, 150, 16), draw(1, 2, 900, 16, seed=1), draw(1, 2, 900, 16, seed=2)
    check(query, key, value, window=(33, None))


# ---- Softcap, ALiBi, bias, sinks ----


def test_softcap_leaves_forbidden_keys_forbidden_and_comes_before_the_bias():
    """onnx#7865, onnxruntime#28370: capped after the mask, -inf became -softcap, and masked keys had weight."""
    query, key, value = (3 * draw(1, 2, 6, 8, seed=n) for n in range(3))
    bias = draw(6, 6, seed=4)
    bias[:, 2] = -np.inf
    check(query, key, value, bias=bias, softcap=1.5)
    _, weights = headway.attention(query, key, value, bias=bias, softcap=1.5, return_weights=True)
    assert not weights[..., 2].any()


def test_softcap_acts_in_every_kind_of_call():
    """flashinfer#1193, sglang#33915: the cap was dropped on one path, and models ran uncapped."""
    query, key, value = 12 * draw(1, 8, 64, 16), draw(1, 2, 64, 16, seed=1), draw(1, 2, 64, 16, seed=2)
    options = {"causal": True, "softcap": 5.0}
    out = check(query, key, value, **options)
    packed = headway.attention_varlen(*(x[0].swapaxes(0, 1) for x in (query, key, value)), [0, 64], [0, 64], **options)
    assert np.array_equal(packed.swapaxes(0, 1), out[0])
    last = headway.attention(query[:, :, -1:], key, value, softcap=5.0)
    assert_close(last, oracle.attention(query[:, :, -1:], key, value, softcap=5.0).out, "float32")


@pytest.mark.parametrize("heads", [1, 3, 12, 40])
def test_alibi_slopes_belong_to_heads_of_any_number_in_every_batch_item(heads):
    """ggml#143, llama.cpp#10683, flash-attention#540: wrong for head counts other than powers of 2, or batch > 1."""
    query, key, value = (draw(3, heads, 7, 8, seed=n) for n in range(3))
    check(query, key, value, alibi_slopes=np.random.default_rng(1).random(heads), causal=True)


def test_alibi_of_the_last_query_is_the_same_alone_and_in_its_sequence():
    """flash-attention#907, vllm#945: distances from another end made decoding differ from training."""
    query, key, value = (draw(1, 4, 50, 16, seed=n, dtype="float64") for n in range(3))
    options = {"causal": "bottom_right", "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625])}
    whole = headway.attention(query, key, value, **options)
    for queries in (1, 2, 7):
        some = headway.attention(query[:, :, -queries:], key, value, **options)
        np.testing.assert_allclose(some, whole[:, :, -queries:], atol=1e-14)


def test_a_learned_bias_of_any_shape_has_its_gradient():
    """xformers#783, flash-attention#17, flash-attention#342: no bias, or one without a gradient."""
    query, key, value = (draw(3, 4, 6, 8, seed=n) for n in range(3))
    for shape in ((3, 4, 6, 6), (1, 4, 6, 6), (4, 1, 6), (6, 6), (3, 1, 1, 6), (1,)):
        check(query, key, value, bias=draw(*shape, seed=5))


@pytest.mark.parametrize("keys", [5, 43, 77])
def test_a_bias_needs_no_alignment(keys):
    """xformers#813, xformers#808, xformers#932: rows of a bias had to be a multiple of 8 long, or a slice of that."""
    query, key, value = (draw(2, 3, keys, 8, seed=n, dtype="float16") for n in range(3))
    bias = draw(2, 3, keys, keys + 3, seed=4, dtype="float16")
    check(query, key, value, bias=np.ascontiguousarray(bias[..., :keys]))
    check(query, key, value, bias=bias[..., 3:])


def test_a_bias_that_grows_with_the_distance_leaves_gradients_finite():
    """pytorch#153799: NaN in backward for 257 bfloat16 keys under a mask and a score of q - k."""
    query, key, value = (draw(1, 1, 257, 16, seed=n, dtype="bfloat16") for n in range(3))
    i, j = np.indices((257, 257))
    check(query, key, value, bias=(i - j).astype(np.float32), causal=True)


# ---- Lengths, packs, sizes ----


def test_every_number_of_keys_is_right_also_with_one_query():
    """pytorch#169222, llama.cpp#3194, tokamax#316: lengths that no block divides read beyond their end."""
    for keys in [*range(1, 70), 127, 128, 129, 255, 257]:
        query, key, value = draw(1, 2, 1, 8), draw(1, 2, keys, 8, seed=1), draw(1, 2, keys, 8, seed=2)
        wide = np.full((1, 2, keys + 40, 8), np.nan, np.float32)  # what lies behind must not show
        wide[:, :, :keys] = key
        assert_close(
            headway.attention(query, wide[:, :, :keys], value), oracle.attention(query, key, value).out, "float32"
        )


EMPTY = [  # query, key, value
    ((0, 0, 2, 0), (0, 0, 2, 0), (0, 0, 2, 0)),
    ((7, 7, 0, 7), (7, 7, 0, 7), (7, 7, 0, 7)),
    ((2, 4, 3, 0), (2, 2, 5, 0), (2, 2, 5, 3)),
]


@pytest.mark.parametrize("query, key, value", EMPTY)
def test_sizes_of_0_give_arrays_of_the_right_shape(query, key, value):
    """pytorch#141218, pytorch#141219, pytorch#174950: a division by zero, or a segmentation fault."""
    for dtype in (np.float16, np.float32):
        out = headway.attention(np.ones(query, dtype), np.ones(key, dtype), np.ones(value, dtype))
        assert out.shape == (*query[:3], value[3]) and (out == 1).all()


def test_packed_sequences_may_be_empty():
    """flash-attention#1537: lengths of 0 beside a longest length of 1 were a shape error."""
    starts_q, starts_k = np.cumsum([0, 0, 1, 0, 1]), np.cumsum([0, 0, 3, 0, 5])
    query, key, value = draw(2, 9, 64), draw(8, 3, 64, seed=1), draw(8, 3, 64, seed=2)
    out = headway.attention_varlen(query, key, value, starts_q, starts_k, causal="bottom_right", scale=1.0)
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        parts = (x.swapaxes(0, 1)[None] for x in (query[row : row + 1], key[keys], value[keys]))
        assert_close(out[row], oracle.attention(*parts, scale=1.0).out[0, :, 0], "float32")


def test_packed_sequences_stay_causal_each_for_itself():
    """xformers#1185: a move to another device lost the causal part. xformers#643: blocks of two lengths."""
    query, key = draw(4, 1, 8), draw(5, 1, 8, seed=1)
    value = np.eye(5, dtype=np.float32)[:, None]
    seen = headway.attention_varlen(query, key, value, [0, 2, 4], [0, 3, 5], causal="bottom_right")[:, 0] > 0
    assert seen.astype(int).tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_any_head_dimension_works():
    """flash-attention#801: only up to 256. Values may have another width."""
    for width, value_width in ((1, 1), (3, 300), (257, 7), (513, 65)):
        query, key, value = draw(1, 2, 5, width), draw(1, 2, 6, width, seed=1), draw(1, 2, 6, value_width, seed=2)
        check(query, key, value)


def test_grouped_heads_follow_each_other():
    """jax-js#180, ml-hypercloning#1: key heads were tiled over the query's heads where they have to be repeated."""
    query = draw(1, 6, 4, 8)
    key, value = draw(1, 2, 5, 8, seed=1), draw(1, 2, 5, 8, seed=2)
    repeated = (np.repeat(x, 3, axis=1) for x in (key, value))
    assert np.array_equal(headway.attention(query, key, value), headway.attention(query, *repeated))
    with pytest.raises(ValueError, match="6"):
        headway.attention(query, draw(1, 4, 5, 8), draw(1, 4, 5, 8))


def test_rows_further_apart_than_32_bits_can_say(tmp_path):
    """pytorch#190857, pytorch#145869: offsets of large tensors overflowed 32 bits."""
    file = np.memmap(tmp_path / "sparse", np.float16, "w+", shape=(2, 2**31 + 64))
    rows = file[:, -64:]
    rows[:] = draw(2, 64, dtype="float16")
    assert np.array_equal(headway.attention(rows, rows, rows), headway.attention(*3 * [np.array(rows)]))


# ---- Layouts ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_and_reversed_inputs_give_the_bits_of_their_copies(dtype):
    """pytorch#181133, pytorch#112577, pytorch#187506, FlagGems#5896: strides were not heeded, and results wrong."""
    # (B, S, H, D) seen as (B, H, S, D); rows of a wider array; D and S exchanged; backwards.
    views = [
        draw(3, 5, 2, 64, dtype=dtype).transpose(0, 2, 1, 3),
        draw(3, 2, 5, 80, seed=1, dtype=dtype)[..., 7:71],
        draw(3, 2, 64, 5, seed=2, dtype=dtype).swapaxes(2, 3),
        draw(3, 2, 5, 64, seed=3, dtype=dtype)[:, ::-1, ::-1, ::-1],
    ]
    for n in range(4):
        inputs = views[n], views[(n + 1) % 4], views[(n + 2) % 4]
        copies = [np.ascontiguousarray(x) for x in inputs]
        assert headway.attention(*inputs).tobytes() == headway.attention(*copies).tobytes()


# ---- The same bits ----


def test_gradients_repeat_bit_for_bit():
    """flash-attention#414, flash-attention#2244, flash-attention#746: dq differed from run to run."""
    query, key, value = draw(2, 4, 130, 16), draw(2, 2, 130, 16, seed=1), draw(2, 2, 130, 16, seed=2)
    out, lse = headway.attention(query, key, value, causal=True, return_lse=True)
    runs = {
        b"".join(x.tobytes() for x in headway.attention_backward(out, query, key, value, out, lse, causal=True)[:3])
        for _ in range(10)
    }
    assert len(runs) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_item_does_not_depend_on_the_rest_of_its_batch(dtype):
    """flash-attention#1897: results changed with the other items of the batch."""
    query, key, value = (draw(5, 4, 33, 16, seed=n, dtype=dtype) for n in range(3))
    whole = headway.attention(query, key, value)
    for b in range(5):
        assert whole[b].tobytes() == headway.attention(*(x[b : b + 1] for x in (query, key, value)))[0].tobytes()


def test_weights_are_there_for_the_asking_and_change_no_bit():
    """flash-attention#159, pytorch#98505: no weights from fused kernels. pytorch#42929: rows summed to more than 1."""
    query, key, value = (draw(1, 2, 40, 16, seed=n) for n in range(3))
    for dropout in ({}, {"dropout": 0.5, "seed": 3}):
        out, weights = headway.attention(query, key, value, return_weights=True, **dropout)
        assert np.array_equal(out, headway.attention(query, key, value, **dropout))
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)


@pytest.mark.parametrize("dropout", [-0.1, 1.5, np.nan])
def test_dropout_outside_0_to_1_is_refused(dropout):
    """flax#5497: a negative or NaN rate passed, and no dropout took place; a missing key failed elsewhere."""
    x = draw(3, 4)
    with pytest.raises(ValueError, match="dropout is .*, expected 0 to 1"):
        headway.attention(x, x, x, dropout=dropout, seed=1)
    with pytest.raises(ValueError, match="seed"):
        headway.attention(x, x, x, dropout=0.5)


def test_a_dropped_weight_scales_the_others_by_1_over_1_minus_p():
    """apex#816: backward scaled by p."""
    query, key, value = (draw(1, 2, 9, 8, seed=n, dtype="float64") for n in range(3))
    check(query, key, value, dropout=0.25, seed=11)
