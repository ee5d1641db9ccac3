"""What must hold for any numbers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import headway
import oracle
from cases import assert_close

sizes = st.integers(1, 12)
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=60, deadline=None)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@quick
@given(seeds, sizes, sizes, sizes)
def test_permuting_keys_with_their_values_changes_nothing(seed, queries, keys, width):
    q, k, v = draw(seed, queries, width), draw(seed + 1, keys, width), draw(seed + 2, keys, width)
    order = np.random.default_rng(seed).permutation(keys)
    np.testing.assert_allclose(headway.attention(q, k[order], v[order]), headway.attention(q, k, v), atol=1e-13)
    assert np.array_equal(headway.attention(q[::-1], k, v)[::-1], headway.attention(q, k, v))


@quick
@given(seeds, st.integers(2, 5), sizes, sizes, st.sampled_from([np.float32, np.float64, np.float16]))
def test_splitting_the_batch_changes_no_bit(seed, batch, length, width, dtype):
    x = draw(seed, batch, 2, length, width).astype(dtype)
    lens = np.random.default_rng(seed).integers(0, length + 1, batch)
    whole = headway.attention(x, x, x, valid_lens=lens, causal=True)
    parts = [
        headway.attention(x[b : b + 1], x[b : b + 1], x[b : b + 1], valid_lens=lens[b : b + 1], causal=True)
        for b in range(batch)
    ]
    assert whole.tobytes() == np.concatenate(parts).tobytes()


@quick
@given(seeds, sizes, sizes, sizes, sizes)
def test_adding_masked_keys_changes_nothing_whatever_they_hold(seed, queries, keys, extra, width):
    q, k, v = draw(seed, queries, width), draw(seed + 1, keys, width), draw(seed + 2, keys, width)
    junk = np.full((extra, width), np.nan)
    mask = np.arange(keys + extra) < keys
    expected = headway.attention(q, k, v)
    for options in ({"mask": mask}, {"valid_lens": [keys]}, {"bias": np.where(mask, 0.0, -np.inf)}):
        found = headway.attention(q, np.concatenate([k, junk]), np.concatenate([v, junk]), **options)
        np.testing.assert_allclose(found, expected, atol=1e-13)


@quick
@given(seeds, sizes, sizes, sizes, st.integers(-20, 20))
def test_scaling_v_by_a_power_of_two_scales_the_result_exactly(seed, queries, keys, width, power):
    q, k, v = draw(seed, queries, width), draw(seed + 1, keys, width), draw(seed + 2, keys, width)
    assert np.array_equal(headway.attention(q, k, v * 2.0**power), headway.attention(q, k, v) * 2.0**power)


@quick
@given(seeds, sizes, sizes, sizes)
def test_weights_sum_to_one_and_lse_is_their_normaliser(seed, queries, keys, width):
    q, k = draw(seed, queries, width), draw(seed + 1, keys, width)
    _, weights, lse = headway.attention(q, k, k, return_weights=True, return_lse=True)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-13)
    scores = headway.attention_scores(q, k, stage="biased")
    np.testing.assert_allclose(np.exp(scores - lse[:, None]), weights, atol=1e-13)


@quick
@given(seeds, sizes, sizes, st.floats(-5, 5), st.one_of(st.none(), st.floats(0.01, 50)))
def test_any_scale_and_softcap(seed, length, width, scale, softcap):
    x = draw(seed, length, width)
    expected = oracle.attention(x, x, x, scale=scale, softcap=softcap)
    assert_close(headway.attention(x, x, x, scale=scale, softcap=softcap), expected.out[0, 0], "float64", 100)


@quick
@given(seeds, st.integers(1, 4), st.integers(1, 3), sizes)
def test_grouped_heads_are_repeated_heads(seed, kv_heads, group, length):
    q, k = draw(seed, 2, kv_heads * group, length, 5), draw(seed + 1, 2, kv_heads, length, 5)
    repeated = np.repeat(k, group, axis=1)
    assert np.array_equal(headway.attention(q, k, k), headway.attention(q, repeated, repeated))


@quick
@given(st.data())
def test_random_arguments_are_answered_with_a_result_or_a_python_error(data):
    arrays = st.one_of(
        st.builds(
            lambda shape, dtype: np.zeros(shape, dtype),
            st.lists(st.integers(0, 4), max_size=5),
            st.sampled_from(["f4", "f8", "f2", "i4", "i8", "u1", "?", "c8", ">f4", "O", "U1"]),
        ),
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.lists(st.one_of(st.integers(-3, 9), st.floats(), st.booleans(), st.none()), max_size=4),
        st.tuples(st.one_of(st.none(), st.integers()), st.one_of(st.none(), st.integers())),
    )
    names = ["mask", "bias", "causal", "window", "valid_lens", "query_lens", "scale", "softcap", "alibi_slopes"]
    names += ["sinks", "dropout", "seed", "return_weights", "return_lse", "out", "engine", "unknown"]
    options = data.draw(st.dictionaries(st.sampled_from(names), arrays, max_size=4))
    x = np.ones((2, 2, 3, 4), np.float32)
    inputs = data.draw(st.lists(st.one_of(st.just(x), arrays), min_size=2, max_size=4))
    for function in (headway.attention, headway.attention_scores, headway.explain):
        try:
            function(*inputs, **options)
        except (ValueError, TypeError, NotImplementedError, MemoryError, OverflowError):
            pass
    assert headway.attention(x, x, x).shape == (2, 2, 3, 4)
