"""analyze and weights_in against the whole matrix."""

import numpy as np
import pytest

import headway

RANDOM = np.random.default_rng(5)
SOME_ROWS = np.arange(24)[:, None] % 5 != 0
CASES = [
    {},
    {"causal": True},
    {"window": (3, 1)},
    {"valid_lens": [9, 0]},
    {"query_lens": [20, 3], "causal": "bottom_right"},
    {"valid_lens": RANDOM.integers(0, 25, (2, 24)), "window": (None, 2)},
    {"mask": RANDOM.random((2, 1, 24, 24)) < 0.5},
    {"mask": np.broadcast_to(SOME_ROWS, (24, 24)), "causal": "top_left"},
    {"bias": np.where(SOME_ROWS, RANDOM.standard_normal((24, 24)), -np.inf)},
    {"bias": RANDOM.standard_normal((4, 24, 24))},
    {"alibi_slopes": [0.5, 0.25, 0.125, 0.0], "softcap": 3.0},
    {"sinks": [0.0, 1.0, 2.0, 3.0]},
]


@pytest.mark.parametrize("options", CASES, ids=lambda options: "+".join(options) or "plain")
def test_statistics_agree_with_the_matrix(options):
    q, k = RANDOM.standard_normal((2, 4, 24, 8)), RANDOM.standard_normal((2, 2, 24, 8))
    p = headway.attention_scores(q, k, **options)
    found = headway.analyze(q, k, top=3, near=(2, 0), cells=5, **options)
    logs = np.log(p, where=p > 0, out=np.zeros_like(p))
    np.testing.assert_allclose(found.entropy, -(p * logs).sum(-1), atol=1e-12)
    np.testing.assert_allclose(found.received, p.sum(-2), atol=1e-12)
    np.testing.assert_allclose(found.first, p[..., 0], atol=1e-14)
    np.testing.assert_allclose(found.top_weights, -np.sort(-p, -1)[..., :3], atol=1e-14)
    chosen = np.take_along_axis(p, np.maximum(found.top_keys, 0), -1)
    np.testing.assert_allclose(np.where(found.top_keys >= 0, chosen, 0.0), found.top_weights, atol=1e-14)
    assert found.row_cell == 5 and found.map_mean.shape == (2, 4, 5, 5)
    np.testing.assert_allclose(found.map_mean[..., 0, 0], p[..., :5, :5].mean((-1, -2)), atol=1e-14)
    np.testing.assert_allclose(found.map_max[..., 4, 4], p[..., 20:, 20:].max((-1, -2)), atol=1e-14)
    np.testing.assert_allclose(headway.mean_weights(q, k, found.lse, **options), p.mean(1), rtol=1e-10, atol=1e-14)
    part = headway.weights_in(q, k, (3, 9), (10, 21), lse=found.lse, **options)
    np.testing.assert_allclose(part, p[..., 3:9, 10:21], rtol=1e-10, atol=1e-14)


def test_results_lose_the_axes_that_the_inputs_lack():
    x = RANDOM.standard_normal((7, 4)).astype(np.float32)
    found = headway.analyze(x, x)
    assert found.entropy.shape == (7,) and found.received.shape == (7,) and found.map_mean.shape == (7, 7)
    assert found.similarity is None and found.entropy.dtype == np.float32
    assert headway.weights_in(x, x, (0, 2), (1, 4)).shape == (2, 3)
    assert headway.mean_weights(x, x, found.lse).shape == (7, 7)
    assert headway.mean_weights(x[None], x[None], found.lse[None]).shape == (1, 7, 7)
    batched = headway.analyze(x[None], x[None])
    assert batched.top_keys.shape == (1, 7, 8)
    assert (batched.top_keys[0, :, 7] == -1).all()


def test_a_long_row_needs_no_matrix():
    x = RANDOM.standard_normal((1, 1, 20_000, 16)).astype(np.float32)
    found = headway.analyze(x[:, :, :64], x, cells=0)
    assert found.received.shape == (1, 1, 20_000) and found.map_mean.shape == (1, 1, 0, 0)
    np.testing.assert_allclose(found.received.sum(), 64, rtol=1e-5)


def test_torch_tensors_give_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.randn(1, 2, 5, 4, dtype=torch.bfloat16)
    found = headway.analyze(x, x)
    assert found.entropy.dtype == torch.float32 and found.top_keys.dtype == torch.int64
    assert headway.weights_in(x, x, (0, 1), (0, 5)).dtype == torch.float32


def test_errors_name_what_is_wrong():
    x = np.zeros((4, 2))
    for call, error, text in [
        (lambda: headway.analyze(x, x, top=-1), ValueError, "analyze: top is -1"),
        (lambda: headway.analyze(x, x, cells=1000), ValueError, "analyze: cells is 1000"),
        (lambda: headway.analyze(x, x, near=3), TypeError, "analyze: near is 3"),
        (lambda: headway.analyze(x, x, topp=3), TypeError, "'top'"),
        (lambda: headway.weights_in(x, x, (0, 5), (0, 4)), ValueError, r"weights_in: rows \[0, 5\)"),
        (lambda: headway.weights_in(x, x, (0, None), (0, 4)), TypeError, "weights_in: rows is"),
        (lambda: headway.weights_in(x, x, (0, 4), (0, 4), lse=np.zeros(3)), ValueError, "weights_in: lse has shape"),
    ]:
        with pytest.raises(error, match=text):
            call()
