"""headway.jax.attention: compiled, differentiated and mapped, against the oracle and against headway.attention."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import headway
import oracle
from cases import DTYPES, assert_close, check_examples, random_case, without_batch_and_heads

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy
hj = pytest.importorskip("headway.jax")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Hundreds of compiled programs take gigabytes."""
    yield
    jax.clear_caches()


ARRAYS = ("mask", "bias", "valid_lens", "query_lens", "alibi_slopes", "sinks")


def as_jax(case):
    """The case's arrays as JAX has them, and those as NumPy arrays: float64 may have become float32."""
    inputs = tuple(jnp.asarray(x) for x in case.inputs)
    options = {name: jnp.asarray(x) if name in ARRAYS else x for name, x in case.options.items()}
    back = {name: np.asarray(x) if name in ARRAYS else x for name, x in options.items()}
    return inputs, options, back


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_the_examples_run():
    for name in hj.__all__:
        check_examples(getattr(hj, name))
    check_examples(hj)


# ---- Every option, every type ----


CASES = [("float32", seed) for seed in range(24)] + [
    (dtype, seed) for dtype in ("float64", "float16", "bfloat16") for seed in range(24, 30)
]


@pytest.mark.parametrize("dtype, seed", CASES)
def test_results_and_gradients_are_headway_s_own_to_the_bit(dtype, seed):
    case = random_case(seed, dtype)
    with jax.enable_x64(dtype == "float64"):
        inputs, options, back = as_jax(case)
        names = [name for name in ("bias", "sinks") if name in options]

        def call(query, key, value, *more):
            return hj.attention(query, key, value, return_lse=True, **{**options, **dict(zip(names, more))})

        @jax.jit
        def everything(grad_out, *given):
            (out, lse), pull = jax.vjp(call, *given)
            weights = hj.attention(*inputs, return_weights=True, **options)[1]
            return out, lse, pull((grad_out, jnp.zeros_like(lse))), weights

        given = (*inputs, *(options[name] for name in names))
        shape = (*case.query.shape[:-1], case.value.shape[-1])
        grad_out = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), inputs[0].dtype)
        out, lse, found, weights = everything(grad_out, *given)
    arrays = [np.asarray(x) for x in inputs]
    expected_out, expected_lse = headway.attention(*arrays, return_lse=True, **back)
    assert np.asarray(out).tobytes() == expected_out.tobytes() and np.asarray(lse).tobytes() == expected_lse.tobytes()
    expected = headway.attention_backward(np.asarray(grad_out), *arrays, expected_out, expected_lse, **back)
    for name, gradient in zip(("query", "key", "value", *names), found):
        assert gradient.dtype == given[("query", "key", "value", *names).index(name)].dtype
        np.testing.assert_array_equal(np.asarray(gradient), getattr(expected, name), err_msg=name)
    answer = oracle.attention(*arrays, **back)
    rank = arrays[0].ndim
    assert_close(out, without_batch_and_heads(answer.out, rank), dtype, 4)
    assert_close(weights, without_batch_and_heads(answer.weights, rank), dtype, 4)


def eager(query, key, value, bias, sinks, *, causal, softcap):
    """Attention in plain JAX, for its derivatives."""
    scores = jnp.einsum("bhid,bhjd->bhij", query, jnp.repeat(key, query.shape[1] // key.shape[1], 1))
    scores = softcap * jnp.tanh(scores / np.sqrt(query.shape[-1]) / softcap) + bias
    if causal:
        scores = jnp.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    with_sink = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], -1)
    lse = jax.scipy.special.logsumexp(with_sink, -1)
    weights = jnp.exp(scores - lse[..., None])
    return jnp.einsum("bhij,bhjd->bhid", weights, jnp.repeat(value, query.shape[1] // value.shape[1], 1)), weights, lse


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_flow_from_the_weights_and_from_lse_too(causal):
    with jax.enable_x64(True):
        shapes = (2, 4, 6, 5), (2, 2, 6, 5), (2, 2, 6, 3), (2, 1, 6, 6), (4,)
        arrays = [normal(*shape, dtype=jnp.float64, seed=seed) for seed, shape in enumerate(shapes)]
        parts = [normal(*shape, dtype=jnp.float64, seed=9) for shape in ((2, 4, 6, 3), (2, 4, 6, 6), (2, 4, 6))]

        def ours(q, k, v, b, s):
            options = {"bias": b, "sinks": s, "causal": causal, "softcap": 2.0}
            return hj.attention(q, k, v, return_weights=True, return_lse=True, **options)

        def loss(function, which, *arrays):
            return sum((result * part).sum() for use, result, part in zip(which, function(*arrays), parts) if use)

        for which in ((1, 1, 1), (0, 0, 1)):
            found = jax.jit(jax.grad(lambda *x: loss(ours, which, *x), argnums=(0, 1, 2, 3, 4)))(*arrays)  # noqa: B023
            plain = lambda *x: eager(*x, causal=causal, softcap=2.0)  # noqa: E731
            expected = jax.grad(lambda *x: loss(plain, which, *x), argnums=(0, 1, 2, 3, 4))(*arrays)  # noqa: B023
            for one, other in zip(found, expected):
                np.testing.assert_allclose(one, other, atol=1e-12)


def test_gradients_in_the_other_order_of_axes_flow_from_the_weights():
    flax = pytest.importorskip("headway.flax")
    x, part = normal(2, 6, 12), normal(8, 6, 6, seed=3)
    layer = flax.MultiHeadAttention(12, 4, 0.0)
    variables = layer.init(jax.random.key(0), x, x, x, None)

    def plain(x):
        q, k, v = (
            layer.apply(variables, x @ variables["params"][name]["kernel"], method="transpose_qkv")
            for name in ("W_q", "W_k", "W_v")
        )
        weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / np.sqrt(3))
        return (weights * part).sum() + (weights @ v).sum()

    def ours(x):
        # The output projection undone: its kernel is set to the unit matrix.
        params = {**variables["params"], "W_o": {"kernel": jnp.eye(12)}}
        output, weights = layer.apply({"params": params}, x, x, x, None)
        return (weights * part).sum() + output.sum()

    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(plain)(x), atol=1e-5)


@pytest.mark.parametrize("seed", range(100, 106))
def test_the_gradient_of_the_gradient_is_its_slope(seed):
    """Along a line through every input, against differences of the gradient in float64."""
    case = random_case(seed)
    with jax.enable_x64(True):
        inputs, options, _ = as_jax(case)
        names = [name for name in ("bias", "sinks") if name in options]
        given = (*inputs, *(options[name] for name in names))
        rng = np.random.default_rng(seed)
        line = [jnp.asarray(rng.standard_normal(x.shape)) for x in given]
        grad_out = jnp.asarray(rng.standard_normal((*inputs[0].shape[:-1], inputs[2].shape[-1])))

        @jax.jit
        def loss(*arrays):
            out = hj.attention(*arrays[:3], **{**options, **dict(zip(names, arrays[3:]))})
            return (grad_out * jnp.sin(out)).sum()

        every = tuple(range(len(given)))
        gradient = jax.jit(jax.grad(loss, every))
        step = 1e-5
        ahead, behind = (
            gradient(*(x + sign * step * direction for x, direction in zip(given, line))) for sign in (1, -1)
        )
        slope = jax.jit(
            jax.grad(lambda *x: sum((g * d).sum() for g, d in zip(jax.grad(loss, every)(*x), line)), every)
        )(*given)
        for found, above, below in zip(slope, ahead, behind):
            expected = (above - below) / (2 * step)
            np.testing.assert_allclose(found, expected, atol=1e-7 * (1 + float(jnp.abs(expected).max(initial=0))))


def test_what_padding_holds_shows_in_no_second_derivative():
    value = jnp.asarray(X).at[:, :, 3:].set(jnp.nan)

    def slope(query):
        loss = lambda x: (hj.attention(x, value, value, valid_lens=[3, 2]) ** 2).sum()  # noqa: E731
        return (jax.grad(loss)(query) ** 2).sum()

    assert jnp.isfinite(jax.grad(slope)(jnp.asarray(X))).all()


# ---- What is compiled ----


def compiled_text(function, *arrays):
    return jax.jit(function).lower(*arrays).compile().as_text()


def test_a_compiled_program_has_one_call_and_moves_nothing():
    x = normal(2, 16, 4, 8)
    text = compiled_text(lambda q, k, v: hj.dot_product_attention(q, k, v, is_causal=True), x, x, x)
    assert text.count('custom_call_target="headway_attention"') == 1
    assert "callback" not in text and not re.search(r"\} (transpose|copy)\(", text)
    gradient = jax.grad(lambda q, k, v: (hj.dot_product_attention(q, k, v) ** 2).sum(), argnums=(0, 1, 2))
    text = compiled_text(gradient, x, x, x)
    assert text.count('custom_call_target="headway_attention_backward"') == 1
    assert "callback" not in text and not re.search(r"\} (transpose|copy)\(", text)


def test_weights_that_nobody_uses_are_not_computed():
    x = normal(1, 2, 16, 8)

    def used(x):
        return hj.attention(x, x, x, return_weights=True)

    assert "headway_attention_weights" in compiled_text(used, x)
    assert "headway_attention_weights" not in compiled_text(lambda x: used(x)[0], x)
    assert "headway_attention_weights" not in compiled_text(jax.grad(lambda x: used(x)[0].sum()), x)


def test_a_bias_s_gradient_is_computed_only_where_it_is_asked_for():
    x, bias = normal(1, 2, 16, 8), normal(1, 2, 16, 16)

    def loss(x, bias):
        return hj.attention(x, x, x, bias=bias).sum()

    assert "query key value bias" in str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, bias))
    assert "query key value bias" not in str(jax.make_jaxpr(jax.grad(loss))(x, bias))


def test_checkpoint_scan_and_several_threads():
    x = normal(2, 2, 8, 4)

    def layer(x, _=None):
        return x + hj.attention(x, x, x, causal=True), None

    def loss(x, layer=layer):
        return (jax.lax.scan(layer, x, length=3)[0] ** 2).sum()

    expected = x
    for _ in range(3):
        expected = expected + hj.attention(expected, expected, expected, causal=True)
    np.testing.assert_allclose(jax.jit(loss)(x), (expected**2).sum(), rtol=1e-5)
    plain = jax.jit(jax.grad(loss))(x)
    again = jax.jit(jax.grad(lambda x: loss(x, jax.checkpoint(layer))))(x)
    np.testing.assert_allclose(plain, again, rtol=1e-6)
    run = jax.jit(jax.grad(loss))
    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(run, [x] * 32):
            assert np.array_equal(result, plain)


def test_shard_map_and_what_all_devices_share():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("device",))
    split, shared = jax.sharding.PartitionSpec("device"), jax.sharding.PartitionSpec()
    x, bias = normal(2, 2, 6, 4), normal(1, 2, 6, 6, seed=1)

    def one(x, bias):
        out, weights, lse = hj.attention(x, x, x, bias=bias, return_weights=True, return_lse=True)
        return out.sum((1, 2, 3)) + (weights**2).sum((1, 2, 3)) + lse.sum((1, 2))

    sharded = jax.shard_map(one, mesh=mesh, in_specs=(split, shared), out_specs=split, check_vma=False)
    for found, expected in zip(
        *(jax.jit(jax.grad(lambda *a, f=f: f(*a).sum(), argnums=(0, 1)))(x, bias) for f in (sharded, one))
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6)


# ---- vmap ----


MAPPED = [(0, 0, 0), (0, None, None), (None, 1, 1), (2, 0, None), (3, 3, 3)]


@pytest.mark.parametrize("axes", MAPPED)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_vmap_is_a_loop_bit_for_bit(axes, dropout):
    def one(q, k, v, bias, lens, sinks):
        options = {"bias": bias, "valid_lens": lens, "sinks": sinks, "dropout": dropout, "seed": 3 if dropout else None}
        return hj.attention(q, k, v, return_weights=True, return_lse=True, **options)

    def stacked(array, axis):
        return array[0] if axis is None else jnp.moveaxis(array, 0, axis)

    sources = normal(3, 2, 4, 5, 8), normal(3, 2, 2, 6, 8, seed=1), normal(3, 2, 2, 6, 8, seed=2)
    q, k, v = (stacked(source, axis) for source, axis in zip(sources, axes))
    bias, lens, sinks = normal(3, 1, 4, 5, 6, seed=3), jnp.array([[1, 6], [0, 2], [3, 4]]), normal(4, seed=4)
    for bias_axis, lens_axis in ((0, 0), (None, 0), (0, None), (None, None)):
        mapped = (*axes, bias_axis, lens_axis, None)
        arguments = (q, k, v, bias if bias_axis == 0 else bias[0], lens if lens_axis == 0 else lens[0], sinks)

        def loss(*arguments, mapped=mapped):
            return sum((result**2)[jnp.isfinite(result)].sum() for result in jax.vmap(one, mapped)(*arguments)[:2])

        found = jax.vmap(one, mapped)(*arguments)
        for item in range(3):
            single = [x if axis is None else jnp.take(x, item, axis) for x, axis in zip(arguments, mapped)]
            for result, expected in zip(found, one(*single)):
                assert np.array_equal(result[item], expected, equal_nan=True)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0, 0), (0, None, None, None, None), (0, 0, 0, None, None)])
def test_the_gradient_of_a_vmap_is_the_sum_of_a_loop(axes):
    def one(q, k, v, bias, sinks):
        return hj.attention(q, k, v, bias=bias, sinks=sinks, causal="bottom_right")

    sources = normal(3, 1, 4, 5, 8), normal(3, 1, 2, 6, 8, seed=1), normal(3, 1, 2, 6, 8, seed=2)
    sources += normal(3, 1, 4, 5, 6, seed=3), normal(3, 4, seed=4)
    arrays = [x if axis == 0 else x[0] for x, axis in zip(sources, axes)]

    def looped(*arrays):
        items = ([x if axis is None else x[item] for x, axis in zip(arrays, axes)] for item in range(3))
        return sum((one(*item) ** 2).sum() for item in items)

    def mapped(*arrays):
        return (jax.vmap(one, axes)(*arrays) ** 2).sum()

    every = tuple(range(5))
    for found, expected in zip(jax.jit(jax.grad(mapped, every))(*arrays), jax.grad(looped, every)(*arrays)):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_vmaps_nest_and_take_keys():
    x = normal(2, 3, 1, 2, 4, 8)
    keys = jax.random.split(jax.random.key(0), (2, 3))

    def one(x, key):
        return hj.attention(x, x, x, dropout=0.5, seed=key)

    found = jax.vmap(jax.vmap(one))(x, keys)
    plain = jax.vmap(jax.vmap(lambda x: hj.attention(x, x, x)))(x)
    for i in range(2):
        for j in range(3):
            assert np.array_equal(found[i, j], one(x[i, j], keys[i, j]))
            assert np.array_equal(plain[i, j], hj.attention(x[i, j], x[i, j], x[i, j]))
    assert jax.vmap(lambda x: hj.attention(x, x, x))(x[0, :0]).shape == (0, 1, 2, 4, 8)


# ---- Seeds ----


def test_a_seed_is_a_number_an_array_or_a_key():
    x = normal(1, 2, 8, 4)
    array = np.asarray(x)

    def dropped(seed):
        return np.asarray(jax.jit(lambda: hj.attention(x, x, x, dropout=0.5, seed=seed))())

    for seed in (0, 7, 2**40 + 3, 2**64 - 1):
        assert np.array_equal(dropped(seed), headway.attention(array, array, array, dropout=0.5, seed=seed))
    assert np.array_equal(dropped(jnp.int32(7)), dropped(7)) and np.array_equal(dropped(np.uint8(7)), dropped(7))
    for number in (np.int64(2**40 + 3), np.array(2**40 + 3), np.array(2**64 - 1, np.uint64)):
        assert np.array_equal(dropped(number), dropped(int(number)))
    with jax.enable_x64(True):
        assert np.array_equal(dropped(jnp.int64(2**40 + 3)), dropped(2**40 + 3))
    key = jax.random.key(1)
    assert np.array_equal(dropped(key), dropped(jax.random.PRNGKey(1)))
    assert not np.array_equal(dropped(key), dropped(jax.random.key(2)))
    traced = jax.jit(lambda key: hj.attention(x, x, x, dropout=0.5, seed=key))
    assert np.array_equal(traced(key), dropped(key))


# ---- Errors ----


X = np.ones((2, 4, 5, 8), np.float32)
REFUSED = [
    ({"scale": float("nan")}, ValueError, "attention: scale is nan, expected a finite number"),
    ({"window": (-1, 0)}, ValueError, "attention: window left is -1"),
    ({"window": [1, 2, 3]}, ValueError, "attention: window is"),
    ({"causal": "left"}, ValueError, "attention: causal is 'left'"),
    ({"softcap": 0.0}, ValueError, "attention: softcap is 0"),
    ({"dropout": 0.5}, ValueError, "attention: dropout"),
    ({"dropout": 0.5, "seed": "x"}, TypeError, "seed"),
    ({"dropout": 0.5, "seed": jnp.ones(3)}, TypeError, r"attention: seed has type float32 and shape \(3,\)"),
    ({"mask": jnp.ones((5, 5))}, TypeError, "attention: mask"),
    ({"mask": jnp.ones((5, 4), bool)}, ValueError, r"attention: mask has shape \(5, 4\)"),
    ({"bias": jnp.ones((5, 5), int)}, TypeError, "attention: bias"),
    ({"sinks": jnp.ones(3)}, ValueError, "attention: sinks"),
    ({"valid_lens": jnp.ones((2, 3), int)}, ValueError, "attention: valid_lens"),
    ({"valid_lens": jnp.ones(2)}, TypeError, "attention: valid_lens"),
    ({"engine": "cuda"}, NotImplementedError, "attention: "),
    ({"is_causal": True}, TypeError, "did you mean 'causal'"),
    ({"attn_mask": None}, TypeError, "did you mean 'mask'"),
    ({"valid_len": None}, TypeError, "did you mean 'valid_lens'"),
]


@pytest.mark.parametrize("options, kind, text", REFUSED)
def test_what_is_wrong_is_said_while_tracing(options, kind, text):
    traced = []
    with pytest.raises(kind, match=text):
        jax.jit(lambda x: traced.append(hj.attention(x, x, x, **options)))(X)
    assert not traced


def test_inputs_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="attention: key has head_dim 7, query has 8"):
        hj.attention(X, X[..., :7], X)
    with pytest.raises(TypeError, match="attention: key has type f16, query has f32"):
        hj.attention(X, jnp.asarray(X, jnp.float16), X)
    with pytest.raises(TypeError, match="attention: query has type i32"):
        hj.attention(*3 * [jnp.ones((2, 3), int)])
    with pytest.raises(ValueError, match="attention: query must have 4 axes"):
        hj.attention(*3 * [jnp.ones((1, 2, 4, 5, 8))])
    with pytest.raises(TypeError, match="scale is traced.*multiply the query by it"):
        jax.jit(lambda scale: hj.attention(X, X, X, scale=scale))(0.5)


def test_lengths_out_of_range_are_errors_of_the_running_program():
    run = jax.jit(lambda lens: hj.attention(X, X, X, valid_lens=lens))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"attention: valid_lens\[1\] is 6, expected 0 to 5"):
        run(jnp.array([5, 6])).block_until_ready()
    assert np.array_equal(run(jnp.array([5, 5])), headway.attention(X, X, X))


def test_options_that_are_no_arrays_are_named():
    for name, given, error, text in [
        ("valid_lens", [None], TypeError, "has type object, expected an array"),
        ("query_lens", ["a"], TypeError, "has type <U1, expected an array"),
        ("spans", [[1, 2], [3]], ValueError, r"is \[\[1, 2\], \[3\]\], expected rows of equal length"),
        ("mask", "x", TypeError, "is a str, expected an array"),
        ("bias", [[1.0, 2.0], [3.0]], TypeError, "is a list, expected an array"),
        ("sinks", [None] * 4, TypeError, "is a list, expected an array"),
    ]:
        with pytest.raises(error, match=f"^attention: {name} {text}"):
            hj.attention(X, X, X, **{name: given})


def test_numbers_that_jax_would_cut_are_errors():
    """JAX keeps 32 bits of what NumPy and Python give it: 2^32 + 3 would be a length of 3."""
    for given in (np.array([5, 2**32 + 3]), [5, 2**32 + 3], np.array([5, 2**32 + 3], np.uint64)):
        with pytest.raises(
            ValueError, match=r"^attention: valid_lens\[1\] is 4294967299, expected a number below 2\^31"
        ):
            hj.attention(X, X, X, valid_lens=given)
    with pytest.raises(ValueError, match=r"^attention: query_lens\[0\] is -4294967293, expected a number below 2\^31"):
        hj.attention(X, X, X, query_lens=np.array([-(2**32) + 3, 5]))
    spans = np.zeros((1, 1, 5, 1, 2), np.int64)
    spans[..., 1] = 2**32 + 5
    with pytest.raises(ValueError, match=r"^attention: spans\[0, 0, 0, 0, 1\] is 4294967301, expected a number below"):
        hj.attention(X, X, X, spans=spans)
    with (
        jax.enable_x64(True),
        pytest.raises(jax.errors.JaxRuntimeError, match=r"valid_lens\[1\] is 4294967299, expected"),
    ):
        hj.attention(X, X, X, valid_lens=np.array([5, 2**32 + 3])).block_until_ready()


def test_forward_mode_and_the_second_derivative_of_lse_are_errors():
    def loss(x):
        out, lse = hj.attention(x, x, x, return_lse=True)
        return (out**2).sum() + lse.sum()

    with pytest.raises(NotImplementedError, match="attention: the second derivative of lse"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(X)
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(loss, (X,), (X,))


def test_the_second_derivative_takes_windows_of_any_width():
    def slope(**options):
        inner = jax.grad(lambda x: (hj.attention(x, x, x, causal="top_left", **options) ** 2).sum())
        return jax.grad(lambda x: (inner(x) ** 2).sum())(X)

    for width in (2**31, 2**40, 2**63 - 1, 2**70):
        np.testing.assert_array_equal(slope(window=(width, 0)), slope())


def test_a_vmap_of_no_items():
    none = jnp.zeros((0, *X.shape))
    for run in (lambda x: hj.attention(x, x, x), lambda x: hj.attention(x, X, X, dropout=0.5, seed=3)):
        assert jax.vmap(run)(none).shape == none.shape
        assert jax.jit(jax.vmap(jax.grad(lambda x, run=run: run(x).sum())))(none).shape == none.shape


def test_slopes_that_are_learnt_are_refused_and_not_taken_for_constants():
    slopes = jnp.ones(4)

    def loss(x, slopes):
        return hj.attention(x, x, x, alibi_slopes=slopes).sum()

    for transform in (jax.grad(loss, 1), jax.jit(jax.grad(loss, (0, 1))), jax.grad(jax.jit(loss), 1)):
        with pytest.raises(ValueError, match="attention: alibi_slopes is differentiated, and has no gradient: pass"):
            transform(X, slopes)
    constant = jax.grad(lambda x, slopes: loss(x, jax.lax.stop_gradient(slopes)), (0, 1))
    found, none = jax.jit(constant)(X, slopes)
    assert np.array_equal(found, jax.grad(loss)(X, slopes)) and not none.any()


def test_empty_axes():
    for shape in ((0, 4, 5, 8), (2, 4, 0, 8), (2, 4, 5, 0)):
        x = jnp.ones(shape)
        assert hj.attention(x, x, x).shape == shape
        assert jax.grad(lambda x: hj.attention(x, x, x).sum())(x).shape == shape
    keyless = hj.attention(jnp.ones((2, 4, 5, 8)), jnp.ones((2, 4, 0, 8)), jnp.ones((2, 4, 0, 3)))
    assert keyless.shape == (2, 4, 5, 3) and not keyless.any()


@pytest.mark.parametrize("package, lowest", [("jax", "0.6"), ("flax", "0.10")])
def test_a_missing_framework_says_what_to_install(package, lowest):
    program = f"import sys; sys.modules['{package}'] = None; import headway.{package}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode != 0 and f"ImportError: headway.{package} needs" in result.stderr
    assert f"{lowest} or later" in result.stderr and f"pip install '{package}>={lowest}'" in result.stderr


def test_types_of_results():
    for name, dtype in DTYPES.items():
        with jax.enable_x64(name == "float64"):
            x = jnp.asarray(X, dtype)
            out, weights, lse = hj.attention(x, x, x, return_weights=True, return_lse=True)
            assert out.dtype == weights.dtype == dtype and lse.dtype == ("float64" if name == "float64" else "float32")


def test_layout_bshd_is_the_same_call_with_heads_after_positions():
    query, key = jax.random.normal(jax.random.key(0), (2, 2, 5, 4, 8))
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (2, 1, 5, 5))
    swapped = [jnp.swapaxes(x, 1, 2) for x in (query, key, key)]
    for options in ({}, {"mask": mask}, {"return_weights": True, "return_lse": True}):
        expected = hj.attention(*swapped, **options)
        found = hj.attention(query, key, key, layout="bshd", **options)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found))):
            np.testing.assert_array_equal(jnp.swapaxes(one, 1, 2) if one.shape[-1] == 8 else one, other)
    with pytest.raises(ValueError, match="attention: layout is 'BSHD', expected 'bhsd' or 'bshd'"):
        hj.attention(query, key, key, layout="BSHD")


def test_numpy_s_function_says_what_to_use_inside_jit():
    with pytest.raises(TypeError, match=r"query cannot be read through DLPack: .*; inside a program .* headway\.jax"):
        jax.jit(lambda x: headway.attention(x, x, x))(jnp.ones((3, 4)))
