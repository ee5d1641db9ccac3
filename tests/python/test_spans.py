"""spans: several ranges of keys for each row, in every function that takes options."""

import numpy as np
import pytest

import headway
import oracle


def inputs(seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((2, 4, 37, 8)).astype(dtype)
    key = rng.standard_normal((2, 2, 70, 8)).astype(dtype)
    value = rng.standard_normal((2, 2, 70, 6)).astype(dtype)
    bounds = np.sort(rng.integers(0, 71, (2, 4, 37, 3, 2)), axis=-1)
    return query, key, value, bounds


def as_bool(spans, keys, rows=None, span_rows=1):
    """(.., entries, R, 2) as a bool mask (.., rows, keys)."""
    j = np.arange(keys)
    inside = ((spans[..., :1] <= j) & (j < spans[..., 1:])).any(-2)
    return inside if rows is None else np.repeat(inside, span_rows, -2)[..., :rows, :]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("part", [np.s_[:], np.s_[:1], np.s_[:, :1], np.s_[0]])
def test_spans_are_the_mask_of_their_union(engine, part, dtype):
    query, key, value, spans = inputs()
    spans = spans[part].astype(dtype)
    exact = oracle.attention(query, key, value, mask=as_bool(spans, 70), causal="bottom_right")
    options = {"spans": spans, "causal": "bottom_right", "engine": engine}
    out, weights, lse = headway.attention(query, key, value, **options, return_weights=True, return_lse=True)
    np.testing.assert_allclose(out, exact.out, atol=1e-13)
    np.testing.assert_allclose(weights, exact.weights, atol=1e-13)
    np.testing.assert_allclose(lse, exact.lse, atol=1e-13)
    np.testing.assert_allclose(headway.attention_scores(query, key, **options), exact.weights, atol=1e-13)
    grad_out = np.random.default_rng(1).standard_normal(out.shape)
    found = headway.attention_backward(grad_out, query, key, value, out, lse, **options)
    expected = oracle.gradients(grad_out, query, key, value, mask=as_bool(spans, 70), causal="bottom_right")
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(getattr(found, name), expected[name], atol=1e-12)


def test_lists_and_blocks_of_rows_are_taken():
    query, key, value, spans = inputs()
    blocks = spans[:, :, :5]
    exact = oracle.attention(query, key, value, mask=as_bool(blocks, 70, 37, 8))
    found = headway.attention(query, key, value, spans=blocks.tolist(), span_rows=8)
    np.testing.assert_allclose(found, exact.out, atol=1e-13)
    plan = headway.explain(query, key, value, spans=blocks, span_rows=8)
    assert plan.pairs == as_bool(blocks, 70, 37, 8).sum() and "spans" in plan.options


def test_fewer_axes_have_fewer_in_spans():
    query, key, value, spans = inputs()
    for number, axes in ((np.s_[:, 0], np.s_[:, 0]), (np.s_[0, 0], np.s_[0, 0])):
        found = headway.attention(query[number], key[number], value[number], spans=spans[axes])
        exact = oracle.attention(query[number], key[number], value[number], mask=as_bool(spans[axes], 70))
        np.testing.assert_allclose(found, exact.out.reshape(found.shape), atol=1e-13)


def test_packed_spans_count_inside_their_sequence():
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((9, 2, 8))
    starts = [0, 4, 9]
    spans = np.sort(rng.integers(0, 5, (9, 2, 2)), axis=-1)
    packed = headway.attention_varlen(rows, rows, rows, starts, starts, spans=spans.clip(0, 4))
    for begin, end in ((0, 4), (4, 9)):
        alone = rows[begin:end].swapaxes(0, 1)[None]
        exact = oracle.attention(alone, alone, alone, mask=as_bool(spans[begin:end].clip(0, 4), end - begin))
        np.testing.assert_allclose(packed[begin:end].swapaxes(0, 1), exact.out[0], atol=1e-13)


def test_analysis_and_trace_honour_them():
    query, key, value, spans = inputs()
    weights = oracle.attention(query, key, value, mask=as_bool(spans, 70)).weights
    found = headway.weights_in(query, key, (3, 20), (10, 60), spans=spans)
    np.testing.assert_allclose(found, weights[:, :, 3:20, 10:60], atol=1e-13)
    received = headway.analyze(query, key, spans=spans).received
    np.testing.assert_allclose(received, weights.sum(2), atol=1e-12)
    trace = headway.trace(query[:1, :1, :3], key[:1, :1, :5], value[:1, :1, :5], spans=[[[0, 2]], [[1, 1]], [[3, 5]]])
    assert "spans" in str(trace)


@pytest.mark.parametrize(
    ("spans", "error", "words"),
    [
        (np.full((2, 4, 37, 1, 2), 71), ValueError, r"spans\[0, 0, 0, 0\] is \(71, 71\).*<= 70"),
        (np.full((2, 4, 37, 1, 2), (5, 4)), ValueError, r"\(5, 4\)"),
        (np.full((37, 1, 2), -1), ValueError, r"\(-1, -1\)"),
        (np.zeros((2, 4, 36, 1, 2), int), ValueError, "shape"),
        (np.zeros((37, 2)), TypeError, "spans"),
        (np.zeros((37, 1, 2)), TypeError, "spans"),
    ],
)
def test_bad_spans_are_named(spans, error, words):
    query, key, value, _ = inputs()
    with pytest.raises(error, match=words):
        headway.attention(query, key, value, spans=spans)


def test_span_rows_need_spans():
    query, key, value, _ = inputs()
    with pytest.raises(ValueError, match="span_rows is 2, but the call has no spans"):
        headway.attention(query, key, value, span_rows=2)


def test_torch_takes_them_and_differentiates():
    torch = pytest.importorskip("torch")
    import headway.torch

    query, key, value, spans = inputs()
    tensors = [torch.from_numpy(x).requires_grad_() for x in (query, key, value)]
    out = headway.torch.attention(*tensors, spans=torch.from_numpy(spans))
    mask = torch.from_numpy(as_bool(spans, 70))
    expected = headway.torch.attention(*tensors, mask=mask)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(a, b)
    blocks = headway.torch.attention(*tensors, spans=spans[:, :, :5], span_rows=8)
    torch.testing.assert_close(blocks, headway.torch.attention(*tensors, mask=mask_of_blocks(torch, spans)))


def mask_of_blocks(torch, spans):
    return torch.from_numpy(as_bool(spans[:, :, :5], 70, 37, 8))
