"""headway.jax on a CUDA device: compiled, differentiated and mapped there, against the oracle. Skipped without one."""

import numpy as np
import pytest

import headway
import oracle
from cases import DTYPES, assert_close, random_case, without_batch_and_heads

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy


def no_cuda():
    """Why the tests cannot run here; None where they can."""
    if "cuda" not in headway.engines():
        return "this build of headway finds no CUDA device"
    return None if jax.default_backend() == "gpu" else "JAX finds no CUDA device here"


pytestmark = pytest.mark.skipif(no_cuda() is not None, reason=str(no_cuda()))
hj = pytest.importorskip("headway.jax")

ARRAYS = ("mask", "bias", "valid_lens", "query_lens", "alibi_slopes", "sinks")
CASES = [(dtype, seed) for dtype in DTYPES for seed in range(12)]


def normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def plain(*arrays):
    return [np.asarray(x).astype(np.float64) for x in arrays]


def on_gpu(array):
    return {device.platform for device in array.devices()} == {"gpu"}


@pytest.mark.parametrize("dtype, seed", CASES)
def test_results_and_gradients_with_every_option(dtype, seed):
    case = random_case(seed, dtype)
    with jax.enable_x64(dtype == "float64"):
        inputs = [jnp.asarray(x) for x in case.inputs]
        options = {name: jnp.asarray(x) if name in ARRAYS else x for name, x in case.options.items()}
        names = [name for name in ("bias", "sinks") if name in options]
        given = (*inputs, *(options[name] for name in names))
        shape = (*case.query.shape[:-1], case.value.shape[-1])
        grad_out = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), inputs[0].dtype)

        def call(query, key, value, *more):
            return hj.attention(query, key, value, return_lse=True, **{**options, **dict(zip(names, more))})

        @jax.jit
        def everything(grad_out, *given):
            (out, lse), pull = jax.vjp(call, *given)
            weights = hj.attention(*given[:3], return_weights=True, **options)[1]
            return out, lse, weights, pull((grad_out, jnp.zeros_like(lse)))

        out, lse, weights, gradients = everything(grad_out, *given)
        assert on_gpu(out) and on_gpu(lse) and all(map(on_gpu, gradients))
        arrays = plain(*inputs)
        numbers = {name: np.asarray(x) if name in ARRAYS else x for name, x in options.items()}
        exact = oracle.attention(*arrays, **numbers)
        expected = oracle.gradients(*plain(grad_out), *arrays, **numbers)
    rank = case.query.ndim
    kept = 1.0 / (1.0 - numbers.get("dropout", 0)) if numbers.get("dropout", 0) < 1 else 1.0
    assert_close(out, without_batch_and_heads(exact.out, rank), dtype, kept)
    assert_close(weights, without_batch_and_heads(exact.weights, rank), dtype)
    assert_close(lse, without_batch_and_heads(exact.lse, rank), "float64" if dtype == "float64" else "float32")
    for name, gradient in zip(("query", "key", "value", *names), gradients):
        assert_close(gradient, expected[name], dtype, 4.0)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_the_drop_in_reads_positions_before_heads_where_they_lie(width, causal):
    query, key, value = normal(2, 320, 8, width), normal(2, 320, 2, width, seed=1), normal(2, 320, 2, width, seed=2)
    call = jax.jit(lambda q, k, v: hj.dot_product_attention(q, k, v, is_causal=causal))
    text = call.lower(query, key, value).compile().as_text()
    assert text.count('custom_call_target="headway_attention"') == 1 and " transpose(" not in text
    exact = oracle.attention(*(x.swapaxes(1, 2) for x in plain(query, key, value)), causal=causal)
    assert_close(call(query, key, value), exact.out.swapaxes(1, 2), "bfloat16")


def test_a_vmap_is_one_call_or_one_for_each_item():
    query, key = normal(3, 2, 4, 64, 64), normal(3, 2, 4, 64, 64, seed=1)
    bias = normal(3, 4, 64, 64, seed=2)
    found = jax.jit(jax.vmap(lambda q, k: hj.attention(q, k, k)))(query, key)
    with_bias = jax.jit(jax.vmap(lambda q, k, b: hj.attention(q, k, k, bias=b)))(query, key, bias)
    for item in range(3):
        arrays = plain(query[item], key[item], key[item])
        assert_close(found[item], oracle.attention(*arrays).out, "bfloat16")
        exact = oracle.attention(*arrays, bias=np.asarray(bias[item]).astype(np.float64))
        assert_close(with_bias[item], exact.out, "bfloat16")


def test_dropout_takes_its_seed_from_a_traced_key():
    x = normal(2, 2, 40, 64)

    @jax.jit
    def call(key):
        return hj.attention(x, x, x, dropout=0.5, seed=key), jax.random.bits(key, (2,), jnp.uint32)

    out, words = call(jax.random.key(3))
    seed = int(words[0]) | int(words[1]) << 32
    assert_close(out, oracle.attention(*plain(x, x, x), dropout=0.5, seed=seed).out, "bfloat16", 2.0)


def test_it_takes_its_turn_on_xla_s_stream():
    """Inputs that other kernels make, and a result that they read, again and again."""
    x, matrix = normal(2, 4, 1024, 128), normal(128, 128, seed=1)

    @jax.jit
    def step(x):
        return hj.attention(x @ matrix, x, x, causal=True) @ matrix * 0.1

    def chain(x):
        for _ in range(20):
            x = step(x)
        return np.asarray(x).tobytes()

    assert len({chain(x) for _ in range(5)}) == 1


def test_the_engine_may_be_named():
    x = normal(1, 2, 8, 64)
    assert_close(hj.attention(x, x, x, engine="cuda"), oracle.attention(*plain(x, x, x)).out, "bfloat16")
    with pytest.raises(Exception, match="reads host memory only"):
        np.asarray(jax.jit(lambda x: hj.attention(x, x, x, engine="cpu"))(x))
