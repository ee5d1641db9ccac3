"""headway.masks: the algebra against bools, attention through masks against the oracle, and what is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headway
import oracle
from cases import DTYPES, HOST_ENGINES, assert_close, check_examples, random_options, without_batch_and_heads
from headway import masks

# ---- The algebra ----


class Drawn:
    """A mask, and its bools as the contract defines them: (B, H, Sq, Sk) or what broadcasts to it."""

    def __init__(self, mask, bools):
        self.mask, self.bools = mask, bools


def positions(queries, keys):
    return np.arange(queries)[:, None] + keys - queries, np.arange(keys)


def ancestors(parents):
    sees = np.zeros((len(parents), len(parents)), bool)
    for token in range(len(parents)):
        above = token
        while above >= 0:
            sees[token, above] = True
            above = parents[above]
    return sees


@st.composite
def leaves(draw, batch, heads, queries, keys):
    at, j = positions(queries, keys)
    kind = draw(
        st.sampled_from(["causal", "window", "first", "prefix", "documents", "blocks", "tree", "spans", "dense"])
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if kind == "causal" or (kind == "tree" and queries > keys):
        return Drawn(masks.causal(), (j <= at)[None, None])
    if kind == "window":
        left, right = (draw(st.none() | st.integers(0, 8)) for _ in range(2))
        bools = np.ones((queries, keys), bool)
        bools &= True if left is None else j >= at - left
        bools &= True if right is None else j <= at + right
        return Drawn(masks.window(left, right), bools[None, None])
    if kind == "first":
        n = draw(st.integers(0, 12))
        return Drawn(masks.first(n), np.broadcast_to(j < n, (1, 1, queries, keys)))
    if kind == "prefix":
        n = rng.integers(0, 12, batch)
        return Drawn(masks.prefix(n), ((j < n[:, None, None]) | (j <= at))[:, None])
    if kind == "documents":
        ids, key_ids = rng.integers(-1, 3, (batch, queries)), rng.integers(-1, 3, keys)
        same = (ids[:, :, None] == key_ids) & (ids[:, :, None] >= 0)
        return Drawn(masks.documents(ids, key_ids), same[:, None])
    if kind == "blocks":
        query_size, key_size = (int(n) for n in rng.integers(1, 5, 2))
        keep = rng.random((heads, -(-queries // query_size), -(-keys // key_size))) < 0.5
        bools = keep.repeat(query_size, 1)[:, :queries].repeat(key_size, 2)[:, :, :keys]
        return Drawn(masks.blocks(keep, (query_size, key_size)), bools[None])
    if kind == "tree":
        parents = [int(rng.integers(-1, i)) if i else -1 for i in range(queries)]
        bools = np.concatenate([np.ones((queries, keys - queries), bool), ancestors(parents)], 1)
        return Drawn(masks.tree(parents), bools[None, None])
    if kind == "spans":
        rows = int(rng.integers(1, 4))
        array = np.sort(rng.integers(0, keys + 1, (batch, heads, -(-queries // rows), 2, 2)), -1)
        inside = (j >= array[..., :1]) & (j < array[..., 1:])
        return Drawn(masks.spans(array, rows), inside.any(3).repeat(rows, 2)[:, :, :queries])
    bools = rng.random((queries, keys)) < 0.5
    return Drawn((masks.dense if draw(st.booleans()) else masks.from_bool)(bools), bools[None, None])


def join(left, right, both):
    if both:
        return Drawn(left.mask & right.mask, left.bools & right.bools)
    return Drawn(left.mask | right.mask, left.bools | right.bools)


@st.composite
def expressions(draw):
    shape = tuple(draw(st.integers(low, high)) for low, high in ((1, 3), (1, 3), (0, 14), (0, 14)))
    leaf = leaves(*shape)
    drawn = draw(st.recursive(leaf, lambda inner: st.builds(join, inner, inner, st.booleans()), max_leaves=5))
    return shape, drawn


@settings(max_examples=300, deadline=None)
@given(expressions())
def test_an_expression_allows_what_bool_algebra_says(case):
    (_, _, queries, keys), drawn = case
    bools = drawn.mask.to_bool(queries, keys)
    assert bools.shape == (drawn.mask.batch, drawn.mask.heads, queries, keys)
    shape = np.broadcast_shapes(bools.shape, drawn.bools.shape)
    np.testing.assert_array_equal(np.broadcast_to(bools, shape), np.broadcast_to(drawn.bools, shape))
    assert drawn.mask.pairs(queries, keys) == bools.sum()


@settings(max_examples=100, deadline=None)
@given(expressions())
def test_attention_through_an_expression_is_attention_through_its_bools(case):
    (batch, heads, queries, keys), drawn = case
    rng = np.random.default_rng(0)
    query = rng.standard_normal((batch, heads, queries, 4))
    key, value = rng.standard_normal((2, batch, heads, keys, 4))
    out, lse = headway.attention(query, key, value, mask=drawn.mask, return_lse=True)
    expected = oracle.attention(query, key, value, mask=drawn.bools)
    assert_close(out, expected.out, "float64")
    assert_close(np.exp(lse), np.exp(expected.lse), "float64")


# ---- Attention ----

QUERIES, KEYS, BATCH, HEADS = 19, 26, 2, 4


def kinds() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    ids, key_ids = rng.integers(-1, 4, (BATCH, QUERIES)), rng.integers(-1, 4, (BATCH, KEYS))
    keep = rng.random((HEADS, 5, 7)) < 0.4
    dense = rng.random((BATCH, 1, QUERIES, KEYS)) < 0.5
    array = np.sort(rng.integers(0, KEYS + 1, (1, HEADS, QUERIES, 3, 2)), -1)
    few = np.zeros((QUERIES, KEYS), bool)
    few[:, 4:9] = few[3:7, 15:] = True
    return {
        "causal": masks.causal(),
        "window": masks.window(5, 2),
        "first": masks.first(3),
        "prefix": masks.prefix([4, 9]),
        "documents": masks.documents(ids, key_ids),
        "blocks": masks.blocks(keep, 4),
        "tree": masks.tree([max(i - 1 - i % 3, -1) for i in range(QUERIES)]),
        "spans": masks.spans(array),
        "dense": masks.dense(dense),
        "from_bool": masks.from_bool(few),
        "first | window": masks.first(2) | masks.window(4, 0),
        "documents & causal": masks.documents(ids, key_ids) & masks.causal(),
        "blocks & causal": masks.blocks(keep, 4) & masks.causal(),
        "dense & prefix": masks.dense(dense) & masks.prefix([4, 9]),
        "dense | first": masks.dense(dense) | masks.first(1),
    }


def inputs(dtype, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((BATCH, HEADS, QUERIES, 8), (BATCH, HEADS // 2, KEYS, 8), (BATCH, HEADS // 2, KEYS, 6))
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


ON_TOP = [
    {},
    {"causal": "bottom_right"},
    {"window": (6, 1)},
    {"valid_lens": np.array([20, 11])},
    {"query_lens": np.array([19, 5]), "causal": "top_left"},
]


@pytest.mark.parametrize("engine", HOST_ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", kinds())
def test_every_kind_is_its_bools_forward_and_backward(kind, dtype, engine):
    mask = kinds()[kind]
    bools = mask.to_bool(QUERIES, KEYS)
    query, key, value = inputs(dtype)
    for options in ON_TOP:
        out, weights, lse = headway.attention(
            query, key, value, mask=mask, return_weights=True, return_lse=True, engine=engine, **options
        )
        expected = oracle.attention(query, key, value, mask=bools, **options)
        assert_close(out, expected.out, dtype)
        assert_close(weights, expected.weights, dtype)
        assert_close(np.exp(lse), np.exp(expected.lse), dtype, scale=4)
        grad = np.cos(np.arange(out.size)).reshape(out.shape).astype(out.dtype)
        found = headway.attention_backward(grad, query, key, value, out, lse, mask=mask, engine=engine, **options)
        gradients = oracle.gradients(grad, query, key, value, mask=bools, **options)
        for name in ("query", "key", "value"):
            assert_close(getattr(found, name), gradients[name], dtype, scale=4)


@pytest.mark.parametrize("seed", range(12))
def test_any_other_option_comes_on_top(seed):
    rng = np.random.default_rng(seed)
    options = random_options(rng, 4, BATCH, HEADS, QUERIES, KEYS)
    options.pop("mask", None)
    if options.get("causal") is True:
        options["causal"] = "top_left"
    query, key, value = inputs("float64", seed)
    for mask in (masks.prefix([4, 9]) & masks.window(9, 3), masks.first(2) | masks.window(3, 0)):
        out = headway.attention(query, key, value, mask=mask, **options)
        expected = oracle.attention(query, key, value, mask=mask.to_bool(QUERIES, KEYS), **options)
        assert_close(out, expected.out, "float64")


@pytest.mark.parametrize("engine", HOST_ENGINES)
def test_nan_in_forbidden_keys_never_shows(engine):
    query, key, value = inputs("float32")
    mask = masks.first(2) | (masks.window(4, 0) & masks.causal())
    bools = mask.to_bool(QUERIES, KEYS)[0, 0]
    seen = bools.any(0)
    assert not seen.all()

    def run(key, value):
        out, lse = headway.attention(query, key, value, mask=mask, return_lse=True, engine=engine)
        return out, lse, *headway.attention_backward(out, query, key, value, out, lse, mask=mask, engine=engine)[:3]

    clean = run(key, value)
    key, value = key.copy(), value.copy()
    key[:, :, ~seen] = value[:, :, ~seen] = np.nan
    for one, other in zip(clean, run(key, value)):
        np.testing.assert_array_equal(one, other)


def test_calls_without_heads_or_batch_take_masks():
    query, key, value = inputs("float64")
    mask = masks.prefix([4, 9])
    items = headway.attention(query[:, 0], key[:, 0], value[:, 0], mask=mask)
    whole = oracle.attention(query[:, :1], key[:, :1], value[:, :1], mask=mask.to_bool(QUERIES, KEYS))
    assert_close(items, without_batch_and_heads(whole.out, 3), "float64")
    one = headway.attention(query[0, 0], key[0, 0], value[0, 0], mask=masks.prefix(4))
    assert_close(one, whole.out[0, 0], "float64")


def test_scores_plans_and_analyses_see_masks():
    query, key, value = inputs("float64")
    mask = masks.first(2) | masks.window(3, 0)
    bools = mask.to_bool(QUERIES, KEYS)
    expected = oracle.attention(query, key, value, mask=bools)
    assert_close(headway.attention_scores(query, key, mask=mask), expected.weights, "float64")
    assert headway.explain(query, key, value, mask=mask).pairs == BATCH * HEADS * mask.pairs(QUERIES, KEYS)
    found = headway.analyze(query, key, mask=mask)
    assert_close(found.first, expected.weights[..., 0], "float64")
    part = headway.weights_in(query, key, (3, 9), (1, 20), mask=mask)
    assert_close(part, expected.weights[..., 3:9, 1:20], "float64")
    traced = headway.trace(query[0, 0], key[0, 0], value[0, 0], mask=mask)
    assert_close(traced.result, expected.out[0, 0], "float64")


def test_a_page_shows_a_mask(tmp_path):
    query, key, _ = inputs("float64")
    page = headway.view(query, key, mask=masks.causal() & masks.window(4, 0), path=tmp_path / "page.html")
    assert page.stat().st_size > 10_000
    alone = headway.view(mask=masks.tree([-1, 0, 0]), tokens=["a", "b", "c"], path=tmp_path / "mask.html")
    assert alone.stat().st_size > 10_000
    with pytest.raises(TypeError, match="view: a mask without query and key needs tokens, expected a list"):
        headway.view(mask=masks.causal())


def test_the_numpy_layer_takes_masks():
    layer = headway.MultiHeadAttention(8, 2)
    x = np.random.default_rng(0).standard_normal((2, 6, 8))
    mask = masks.documents(lengths=[4, 2]) & masks.causal()
    np.testing.assert_allclose(layer.forward(x, x, x, mask=mask), layer.forward(x, x, x, mask=mask.to_bool(6, 6)))


# ---- Packed sequences ----


def pack(seed=0):
    rng = np.random.default_rng(seed)
    starts_q, starts_k = [0, 5, 5, 12, 17], [0, 9, 10, 17, 21]
    rows = [rng.standard_normal(shape) for shape in ((17, 2, 8), (21, 1, 8), (21, 1, 6))]
    return rows, starts_q, starts_k


@pytest.mark.parametrize("engine", HOST_ENGINES)
def test_in_a_pack_a_mask_is_applied_inside_each_sequence(engine):
    (query, key, value), starts_q, starts_k = pack()
    lens = [2, 1, 0, 3]
    mask = masks.prefix(lens) & (masks.window(3, None) | masks.first(1))
    out, lse = headway.attention_varlen(
        query, key, value, starts_q, starts_k, mask=mask, return_lse=True, engine=engine
    )
    found = headway.attention_varlen_backward(
        np.cos(out), query, key, value, out, lse, starts_q, starts_k, mask=mask, engine=engine
    )
    for b, n in enumerate(lens):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        alone = [x.swapaxes(0, 1)[None] for x in (query[rows], key[keys], value[keys])]
        own = masks.prefix(n) & (masks.window(3, None) | masks.first(1))
        bools = own.to_bool(rows.stop - rows.start, keys.stop - keys.start)
        expected = oracle.attention(*alone, mask=bools)
        assert_close(out[rows].swapaxes(0, 1)[None], expected.out, "float64")
        gradients = oracle.gradients(np.cos(expected.out), *alone, mask=bools)
        assert_close(found.query[rows].swapaxes(0, 1)[None], gradients["query"], "float64", scale=4)
        assert_close(found.key[keys].swapaxes(0, 1)[None], gradients["key"], "float64", scale=4)


# ---- Other libraries ----


def test_torch_arrays_make_masks_and_go_through_them():
    torch = pytest.importorskip("torch")
    ids = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int16)
    mask = masks.documents(ids) & masks.dense(torch.ones(5, 5, dtype=torch.bool).tril())
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    out = headway.attention(x, x, x, mask=mask)
    expected = oracle.attention(x.numpy(), x.numpy(), x.numpy(), mask=mask.to_bool(5, 5))
    assert_close(out.numpy(), expected.out, "float64")


@pytest.mark.parametrize("sizes", [(300, 300), (200, 450), (129, 64)])
def test_a_block_mask_of_torch_is_read(sizes):
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    ids = torch.arange(500) // 70

    def rule(b, h, i, j):
        return (ids[i] == ids[j]) & ((j <= i) | (h == 1)) | (j < 3 * b)

    block_mask = flex.create_block_mask(rule, 2, 3, *sizes, device="cpu", BLOCK_SIZE=(64, 32))
    b, h, i, j = np.indices((2, 3, *sizes))
    numbers = ids.numpy()
    expected = (numbers[i] == numbers[j]) & ((j <= i) | (h == 1)) | (j < 3 * b)
    np.testing.assert_array_equal(masks.from_block_mask(block_mask).to_bool(*sizes), expected)
    blocks = flex.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32), BLOCK_SIZE=4
    )
    assert masks.from_block_mask(blocks).pairs(8, 8) == 8 * 4


def test_what_is_no_block_mask_is_refused():
    with pytest.raises(TypeError, match="masks.from_block_mask: found a int, expected a torch BlockMask"):
        masks.from_block_mask(3)


# ---- Values ----


def test_masks_are_values():
    mask = masks.first(2) | masks.causal()
    assert copy.deepcopy(mask).pairs(4, 4) == mask.pairs(4, 4) == copy.copy(mask).pairs(4, 4)
    assert repr(mask & masks.window(3, None)) == "(first(2) | causal()) & window(3, None)"
    assert str(masks.causal()) == masks.causal().draw(8, 8)
    assert str(masks.documents([0, 1]) & masks.documents([0, 1, 2])) == "documents(2 ids) & documents(3 ids)"
    assert mask.heads == 1 and masks.prefix([1, 2]).batch == 2


def test_the_array_that_a_mask_was_made_of_may_change():
    bools, ids = np.ones((3, 3), bool), np.zeros(3, int)
    dense, documents = masks.dense(bools), masks.documents(ids)
    bools[:] = False
    ids[:] = [0, 1, 2]
    assert dense.pairs(3, 3) == documents.pairs(3, 3) == 9


def test_blocks_stay_lists_and_from_bool_finds_spans():
    array, rows = masks.blocks(np.eye(16, dtype=bool), 64).spans(1024, 1024)
    assert array.shape == (1, 1, 16, 1, 2) and array.dtype == np.int32 and rows == 64
    array, rows = masks.from_bool(np.tril(np.ones((99, 99), bool))).spans(99, 99)
    assert array.shape == (1, 1, 99, 1, 2) and rows == 1
    with pytest.raises(ValueError, match="has a dense part"):
        masks.from_bool(np.random.default_rng(0).random((99, 99)) < 0.5).spans(99, 99)


def test_spans_of_a_mask_are_the_spans_option():
    query, key, value = inputs("float64")
    mask = masks.first(2) | masks.window(3, 0)
    array, rows = mask.spans(QUERIES, KEYS)
    one = headway.attention(query, key, value, spans=array, span_rows=rows)
    np.testing.assert_array_equal(one, headway.attention(query, key, value, mask=mask))


# ---- Errors ----

BAD = {
    "masks.window: left is -1, expected 0 or more, or None for unlimited": lambda: masks.window(-1, 0),
    "masks.first: n is -1, expected 0 or more": lambda: masks.first(-1),
    "masks.tree: parents[1] is 2, expected a token before it": lambda: masks.tree([-1, 2, 1]),
    "masks.spans: span 0 of entry 0 is (3, 2), expected 0 <= begin <= end": lambda: masks.spans([[[3, 2]]]),
    "masks.blocks: size is 0, expected 1 or more": lambda: masks.blocks(np.ones((2, 2), bool), 0),
    "masks.blocks: size is (1, 2, 3), expected a number or a pair": lambda: masks.blocks([[True]], (1, 2, 3)),
    "Mask.pairs: spans has an end of 9, expected at most the 8 keys": lambda: masks.spans([[[0, 9]]]).pairs(1, 8),
    "Mask.to_bool: documents has 2 ids, expected one for each of the 3 queries": (
        lambda: masks.documents([0, 1]).to_bool(3, 3)
    ),
    "masks: the left mask has 2 batch items, the right one 3": lambda: masks.first([1, 2]) & masks.first([1, 2, 3]),
    # Two hashes are two documents, also where i64 does not hold them.
    "masks.documents: ids[0, 1] is 9223372036854775809, expected a number below 2^63": lambda: masks.documents(
        np.array([[1, 2**63 + 1, 2**63 + 2]], np.uint64)
    ),
    "masks.documents: ids is [36893488147419103232, 1], expected numbers below 2^63": lambda: masks.documents(
        [2**65, 1]
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_values_are_value_errors(text):
    with pytest.raises(ValueError, match=re.escape(text)):
        BAD[text]()


WRONG_TYPES = {
    "masks: there is no ~: the complement of most masks takes many spans a row": lambda: ~masks.causal(),
    "masks: a mask is neither true nor false": lambda: masks.causal() and masks.first(1),
    "masks: found a ndarray, expected a mask on both sides of & and |": lambda: masks.causal() & np.ones((2, 2), bool),
    "masks: found a bool, expected a mask": lambda: True | masks.causal(),
    "masks.documents: ids has type float64, expected integers": lambda: masks.documents(np.zeros(3)),
    "masks.dense: the array has type i64, expected bool": lambda: masks.dense(np.zeros((2, 2), np.int64)),
    "masks.documents: found neither ids nor lengths, expected one": lambda: masks.documents(),
    "masks.documents: found both ids and lengths, expected one": lambda: masks.documents([0], lengths=[1]),
}


@pytest.mark.parametrize("text", WRONG_TYPES)
def test_wrong_types_are_type_errors(text):
    with pytest.raises(TypeError, match=re.escape(text)):
        WRONG_TYPES[text]()


def test_an_array_on_the_left_is_refused_too():
    with pytest.raises(TypeError, match="masks: found a ndarray"):
        np.ones((2, 2), bool) & masks.causal()


IN_A_CALL = {
    "attention: mask has 3 batch items, expected 2 or 1": masks.prefix([1, 2, 3]),
    "attention: mask has 3 heads, expected 4 or 1": masks.dense(np.ones((3, QUERIES, KEYS), bool)),
    "attention: documents has 5 ids, expected one for each of the 19 queries": masks.documents(np.zeros(5, int)),
    "attention: blocks has 2 x 2 blocks, expected 5 x 7 of 4 for 19 queries and 26 keys": (
        masks.blocks(np.ones((2, 2), bool), 4)
    ),
    "attention: tree has 20 tokens": masks.tree(np.arange(20) - 1),
}


@pytest.mark.parametrize("text", IN_A_CALL)
def test_what_does_not_fit_a_call_is_refused_by_it(text):
    with pytest.raises(ValueError, match=re.escape(text)):
        headway.attention(*inputs("float32"), mask=IN_A_CALL[text])


@pytest.mark.parametrize("name", masks.__all__)
def test_docstrings_have_examples_that_run(name):
    if name == "from_block_mask":
        pytest.importorskip("torch.nn.attention.flex_attention")
    check_examples(getattr(masks, name))
