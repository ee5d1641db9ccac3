"""attention, its scores and its gradients, against the oracle."""

import numpy as np
import pytest

import headway
import oracle
from cases import DTYPES, HOST_ENGINES, assert_close, random_case, without_batch_and_heads

SEEDS = range(120)


def as_float64(case):
    return [np.asarray(array).astype(np.float64) for array in case.inputs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", HOST_ENGINES)
def test_every_option_with_every_other(dtype, engine):
    for seed in SEEDS:
        case = random_case(seed, dtype)
        expected = oracle.attention(*as_float64(case), **case.options)
        out, weights, lse = headway.attention(
            *case.inputs, **case.options, return_weights=True, return_lse=True, engine=engine
        )
        rank = case.query.ndim
        assert out.dtype == weights.dtype == case.query.dtype
        assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
        keep = 1.0 / (1.0 - case.options.get("dropout", 0)) if case.options.get("dropout", 0) < 1 else 1.0
        assert_close(out, without_batch_and_heads(expected.out, rank), dtype, keep)
        assert_close(weights, without_batch_and_heads(expected.weights, rank), dtype)
        assert_close(lse, without_batch_and_heads(expected.lse, rank), "float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_with_every_option(dtype):
    for seed in SEEDS:
        case = random_case(seed, dtype)
        out, lse = headway.attention(*case.inputs, **case.options, return_lse=True)
        grad_out = np.random.default_rng(seed).standard_normal(out.shape).astype(out.dtype)
        found = headway.attention_backward(grad_out, *case.inputs, out, lse, **case.options)
        expected = oracle.gradients(grad_out.astype(np.float64), *as_float64(case), **case.options)
        for name in ("query", "key", "value", "bias", "sinks"):
            gradient = getattr(found, name)
            if name not in expected:
                assert gradient is None
                continue
            like = case.options.get(name, getattr(case, name, None))
            assert gradient.dtype == like.dtype and gradient.shape == like.shape
            assert_close(gradient, expected[name], dtype, 4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", ["scaled", "capped", "biased", "weights"])
def test_scores_after_every_stage(dtype, stage):
    for seed in SEEDS:
        case = random_case(seed, dtype)
        found = headway.attention_scores(case.query, case.key, stage=stage, **case.options)
        expected = oracle.attention(*as_float64(case), **case.options).stages[stage]
        assert found.dtype == case.query.dtype
        assert_close(found, without_batch_and_heads(expected, case.query.ndim), dtype)


def test_the_default_stage_is_weights():
    case = random_case(1)
    weights = headway.attention_scores(case.query, case.key, **case.options)
    assert np.array_equal(weights, headway.attention(*case.inputs, **case.options, return_weights=True)[1])


def test_results_come_in_one_order():
    x = np.ones((2, 3, 5, 4))
    out = headway.attention(x, x, x)
    assert isinstance(out, np.ndarray) and out.shape == (2, 3, 5, 4)
    assert [a.shape for a in headway.attention(x, x, x, return_weights=True)] == [(2, 3, 5, 4), (2, 3, 5, 5)]
    assert [a.shape for a in headway.attention(x, x, x, return_lse=True)] == [(2, 3, 5, 4), (2, 3, 5)]
    both = headway.attention(x, x, x, return_lse=True, return_weights=True)
    assert isinstance(both, tuple) and [a.shape for a in both] == [(2, 3, 5, 4), (2, 3, 5, 5), (2, 3, 5)]


def test_asking_for_weights_changes_no_bit():
    for seed in range(40):
        case = random_case(seed, "float32")
        plain = headway.attention(*case.inputs, **case.options)
        asked = headway.attention(*case.inputs, **case.options, return_weights=True, return_lse=True)[0]
        assert plain.tobytes() == asked.tobytes()


def test_an_out_array_is_written_and_returned():
    case = random_case(3, "float32")
    expected = headway.attention(*case.inputs, **case.options)
    given = np.full_like(expected, np.nan)
    returned, _ = headway.attention(*case.inputs, **case.options, out=given, return_lse=True)
    assert returned is given and given.tobytes() == expected.tobytes()
    scores = headway.attention_scores(case.query, case.key)
    given = np.full_like(scores, np.nan)
    assert headway.attention_scores(case.query, case.key, out=given) is given
    assert np.array_equal(given, scores)


def test_a_row_with_no_key_gives_zero():
    x = np.random.default_rng(0).standard_normal((2, 2, 4, 8)).astype(np.float32)
    mask = np.ones((4, 4), bool)
    mask[2] = False
    out, weights, lse = headway.attention(x, x, x, mask=mask, return_weights=True, return_lse=True)
    assert not out[:, :, 2].any() and not weights[:, :, 2].any() and np.isneginf(lse[:, :, 2]).all()
    gradients = headway.attention_backward(np.ones_like(out), x, x, x, out, lse, mask=mask)
    assert not gradients.query[:, :, 2].any() and np.isfinite(gradients.key).all()


def test_lists_and_numbers_are_taken_where_they_are_small():
    x = np.random.default_rng(0).standard_normal((2, 2, 4, 8))
    expected = headway.attention(
        x, x, x, valid_lens=np.array([1, 3]), query_lens=np.array([4, 2]), alibi_slopes=np.array([1.0, 2.0])
    )
    found = headway.attention(x, x, x, valid_lens=[1, 3], query_lens=(4, 2), alibi_slopes=[1, 2])
    assert np.array_equal(found, expected)
    one = x[0, 0]
    assert np.array_equal(
        headway.attention(one, one, one, valid_lens=2, sinks=0.5, alibi_slopes=1.0),
        headway.attention(one, one, one, valid_lens=[2], sinks=[0.5], alibi_slopes=[1.0]),
    )
    assert np.array_equal(
        headway.attention(x, x, x, mask=[True, False, True, True]),
        headway.attention(x, x, x, mask=np.array([True, False, True, True])),
    )
    empty = np.zeros((0, 2, 4, 8))
    assert headway.attention(empty, empty, empty, valid_lens=[], query_lens=[]).shape == empty.shape


@pytest.mark.parametrize("integer", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_lengths_are_any_integers(integer):
    x = np.random.default_rng(0).standard_normal((2, 2, 4, 8))
    lens = np.array([[1, 2, 3, 4], [4, 0, 2, 1]])
    expected = headway.attention(x, x, x, valid_lens=lens, query_lens=np.array([3, 4]))
    assert np.array_equal(
        headway.attention(x, x, x, valid_lens=lens.astype(integer), query_lens=np.array([3, 4], integer)), expected
    )
    rows, starts = x[0].swapaxes(0, 1), np.array([0, 1, 4], integer)
    headway.attention_varlen(rows, rows, rows, starts, starts)


@pytest.mark.parametrize("floating", DTYPES)
def test_sinks_slopes_and_bias_are_any_floating_type(floating):
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 4)).astype(np.float32)
    small = np.array([0.5, 0.25], DTYPES[floating])
    options = {"sinks": small, "alibi_slopes": small, "bias": np.ones((3, 3), DTYPES[floating])}
    out, lse = headway.attention(x, x, x, **options, return_lse=True)
    plain = {name: array.astype(np.float64) for name, array in options.items()}
    assert_close(out, oracle.attention(x, x, x, **plain).out, "float32")
    gradients = headway.attention_backward(out, x, x, x, out, lse, **options)
    assert gradients.sinks.dtype == gradients.bias.dtype == DTYPES[floating]


def test_causal_true_is_for_squares_and_names_the_choices():
    q, k = np.ones((1, 1, 3, 4)), np.ones((1, 1, 5, 4))
    assert np.array_equal(headway.attention(q, q, q, causal=True), headway.attention(q, q, q, causal=np.bool_(True)))
    with pytest.raises(ValueError, match="top_left.*bottom_right"):
        headway.attention(q, k, k, causal=True)


def test_windows_of_any_size():
    x = np.random.default_rng(0).standard_normal((6, 4))
    everything = headway.attention(x, x, x)
    for window in [(None, None), (10**30, 2**63), [6, 6], (np.int32(6), None), np.array([6, 6])]:
        assert np.array_equal(headway.attention(x, x, x, window=window), everything)


def test_seeds_cover_64_bits_and_repeat():
    x = np.random.default_rng(0).standard_normal((16, 8))
    for seed in (0, 1, 2**32, 2**63, 2**64 - 1, np.uint64(2**64 - 1), np.int64(7)):
        expected = oracle.attention(x, x, x, dropout=0.5, seed=int(seed)).out[0, 0]
        assert_close(headway.attention(x, x, x, dropout=0.5, seed=seed), expected, "float64")


def test_a_bias_s_gradient_can_be_left_out():
    rng = np.random.default_rng(0)
    query, key, value, grad_out = rng.standard_normal((4, 2, 3, 9, 8))
    options = {"bias": rng.standard_normal((1, 3, 1, 9)), "sinks": np.zeros(3)}
    out, lse = headway.attention(query, key, value, return_lse=True, **options)
    all_of_them = headway.attention_backward(grad_out, query, key, value, out, lse, **options)
    found = headway.attention_backward(grad_out, query, key, value, out, lse, bias_gradient=False, **options)
    assert found.bias is None and all_of_them.bias is not None
    for name in ("query", "key", "value", "sinks"):
        assert getattr(found, name).tobytes() == getattr(all_of_them, name).tobytes()


def test_large_results_share_no_memory_and_live_as_long_as_their_views():
    x = np.random.default_rng(0).standard_normal((1, 4, 512, 64)).astype(np.float32)
    _, weights = headway.attention(x, x, x, return_weights=True)  # 4 MiB of weights
    bits, row = weights.tobytes(), weights[0, 1, 2]
    assert weights.flags.writeable and weights.flags.c_contiguous
    _, others = headway.attention(x, x, 2 * x, scale=1.0, return_weights=True)
    assert not np.shares_memory(weights, others) and weights.tobytes() == bits
    expected = row.copy()
    del weights
    for _ in range(3):
        headway.attention(x, x, x, scale=1.0, return_weights=True)
    assert (row == expected).all()
