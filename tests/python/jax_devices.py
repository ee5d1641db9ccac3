"""Checks of headway.jax.ring_attention on four host devices; test_jax_ring.py runs them in a process of their own."""

import itertools
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import headway.jax
import headway.masks
import oracle

ROWS = PartitionSpec(None, None, "s")


def inputs(queries, keys, dtype):
    random = np.random.default_rng(queries + keys)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6), (2, 4, queries, 6))
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def ring(devices, arrays=(), specs=(), **options):
    """The call on so many devices: (query, key, value, *arrays), which are options by name."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("s",))

    def call(query, key, value, *given):
        return headway.jax.ring_attention(
            query, key, value, axis_name="s", return_lse=True, **options, **dict(zip(arrays, given, strict=True))
        )

    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(ROWS,) * 3 + tuple(specs), out_specs=(ROWS, ROWS)))


# ---- Every option with every other ----

FACTORS = {
    "devices": (1, 2, 3, 4),
    "causal": (False, "top_left", "bottom_right"),
    "window": (None, (5, 2), (14, None)),
    "lengths": ("none", "valid", "valid of rows", "query"),
    "pairs": ("all", "mask", "bias", "bias of keys", "documents"),
    "scores": ("plain", "softcap", "sinks"),
}


def is_legal(case):
    return case["causal"] != "bottom_right" or case["lengths"] not in ("valid", "query")


def pairs_of(case):
    return set(itertools.combinations(case.items(), 2))


def covering():
    """Cases in which every two levels of two factors that are legal together occur together."""
    random = np.random.default_rng(0)
    every = [dict(zip(FACTORS, levels, strict=True)) for levels in itertools.product(*FACTORS.values())]
    legal = [case for case in every if is_legal(case)]
    left = set().union(*map(pairs_of, legal))
    while left:
        some = [legal[n] for n in random.integers(0, len(legal), 100)]
        best = max(some, key=lambda case: len(pairs_of(case) & left))
        left -= pairs_of(best)
        yield best


def options_of(case, queries, keys):
    """What the oracle is given, and the sharded axis of each array (None: every device has the whole)."""
    random = np.random.default_rng(3)
    options, axes = {"causal": case["causal"], "window": case["window"]}, {}
    if case["lengths"] == "valid":
        options["valid_lens"], axes["valid_lens"] = np.array([keys // 2 + 1, 0]), None  # shards without a visible key
    elif case["lengths"] == "valid of rows":
        options["valid_lens"], axes["valid_lens"] = random.integers(0, keys + 1, (2, queries)), 1
    elif case["lengths"] == "query":
        options["query_lens"], axes["query_lens"] = np.array([queries, queries // 3]), None
    if case["pairs"] == "mask":
        options["mask"], axes["mask"] = random.random((2, 1, queries, keys)) < 0.6, 2
    elif case["pairs"] == "bias":
        options["bias"], axes["bias"] = random.standard_normal((1, 4, queries, keys)).astype(np.float32), 2
    elif case["pairs"] == "bias of keys":
        options["bias"], axes["bias"] = random.standard_normal((1, 4, 1, keys)).astype(np.float32), None
    if case["scores"] == "softcap":
        options |= {"softcap": 2.0, "scale": 0.5, "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32)}
        axes["alibi_slopes"] = None
    elif case["scores"] == "sinks":
        options["sinks"], axes["sinks"] = random.standard_normal(4).astype(np.float32), None
    return options, axes


def check(case, queries=24, keys=24, dtype=jnp.float32, tolerance=2e-5):
    query, key, value, grad_out = inputs(queries, keys, dtype)
    plain = [np.asarray(x, np.float64) for x in (query, key, value)]
    options, axes = options_of(case, queries, keys)
    expected_options = dict(options)
    static = {name: x for name, x in options.items() if name not in axes}
    if case["pairs"] == "documents":
        ids = np.arange(keys) // 7
        static["mask"] = headway.masks.documents(ids[keys - queries :], ids)
        expected_options["mask"] = static["mask"].to_bool(queries, keys)
    arrays = {name: jnp.asarray(options[name]) for name in axes}
    specs = [PartitionSpec(*[None] * axis, "s") if axis else PartitionSpec() for axis in axes.values()]
    wanted = [name for name in ("bias", "sinks") if name in arrays]
    whole = ring(case["devices"], tuple(arrays), specs, **static)

    def call(query, key, value, of_wanted):
        return whole(query, key, value, *{**arrays, **of_wanted}.values())

    expected = oracle.attention(*plain, **expected_options)
    exact = oracle.gradients(np.asarray(grad_out, np.float64), *plain, **expected_options)
    (out, lse), pull = jax.vjp(call, query, key, value, {name: arrays[name] for name in wanted})
    *gradients, of_wanted = pull((grad_out, jnp.zeros_like(lse)))
    found = {"out": out, "lse": lse, **dict(zip(("query", "key", "value"), gradients, strict=True)), **of_wanted}
    for name, x in found.items():
        near = exact[name] if name in exact else getattr(expected, name)
        np.testing.assert_allclose(
            np.asarray(x, np.float64), near, rtol=tolerance, atol=tolerance * (1 + np.abs(near, where=np.isfinite(near),
            out=np.zeros(near.shape)).max(initial=0)), err_msg=f"{name}: {case}, {queries} x {keys}, {dtype}"
        )  # fmt: skip


def check_batch():
    """headway.jax.attention itself inside shard_map: a batch over two devices needs no ring."""
    query, key, value, grad_out = inputs(24, 24, jnp.float32)
    mesh, items = Mesh(np.array(jax.devices()[:2]), ("b",)), PartitionSpec("b")
    call = jax.jit(jax.shard_map(headway.jax.attention, mesh=mesh, in_specs=(items,) * 3, out_specs=items))
    found = jax.vjp(call, query, key, value)[1](grad_out)
    exact = oracle.gradients(*(np.asarray(x, np.float64) for x in (grad_out, query, key, value)))
    for x, name in zip(found, ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(np.asarray(x), exact[name], rtol=2e-5, atol=2e-5)


def check_infinite_scores(devices):
    """A part whose scores of a row are all -inf leaves the row to other parts; NaN, and whole rows of -inf, are NaN."""
    query, key, value, grad_out = inputs(24, 24, jnp.float32)
    query = abs(query)
    for begin in range(24 // devices, 24, 24 // devices):  # with the window, a row sees its own key and the one before
        key = key.at[0, :, begin - 1].set(-jnp.inf)  # of the device before
        key = key.at[1, 0, begin - 1 : begin + 1].set(-jnp.inf).at[1, 1, begin - 1].set(jnp.nan)
    options = {"window": (1, 0)}
    expected = headway.jax.attention(query, key, value, return_lse=True, **options)
    assert np.isfinite(expected[1][0]).all() and np.isnan(expected[1][1]).any()
    call = ring(devices, **options)
    for found, whole in zip(call(query, key, value), expected, strict=True):
        np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-5)
    found = jax.vjp(lambda value: call(query, key, value)[0], value)[1](grad_out)[0]
    whole = jax.vjp(lambda value: headway.jax.attention(query, key, value, **options), value)[1](grad_out)[0]
    np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-5)


def permutes(devices, **options):
    """How often the compiled program sends keys and values on."""
    query, key, value, _ = inputs(24, 24, jnp.float32)
    return ring(devices, **options).lower(query, key, value).as_text().count("collective_permute")


if __name__ == "__main__":
    for number, case in enumerate(covering()):  # each is compiled anew
        check(case, *((12, 36) if number % 3 == 1 else (24, 24)))
    plain = {name: levels[0] for name, levels in FACTORS.items()}
    check(plain | {"devices": 2, "causal": "top_left"}, dtype=jnp.bfloat16, tolerance=5e-2)
    check(plain | {"devices": 2}, queries=0)
    check_infinite_scores(3)
    check_batch()
    # A causal window of 5 keys reaches one block back on three devices of eight rows: one step of K and V.
    assert permutes(3, causal=True, window=(5, None)) == 2
    assert permutes(3, causal=True) == 4
    call = ring(4, causal=True)
    query, key, value, _ = inputs(24, 24, jnp.float32)
    assert len({np.asarray(call(query, key, value)[0]).tobytes() for _ in range(20)}) == 1
    try:
        ring(2, causal="bottom_right", valid_lens=np.array([3, 4]))(query, key, value)
    except NotImplementedError as error:
        assert "lengths of batch items with causal='bottom_right'" in str(error)
    else:
        raise AssertionError("nothing was raised")
