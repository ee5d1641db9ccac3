"""Checks of headway.jax.attention under jit on sharded arrays, on four host devices; test_jax_sharding.py runs them."""

import os
import re

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import headway.jax
import oracle

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
MOVES = re.compile(r"\b(all-gather|all-to-all|collective-permute|all-reduce|dynamic-slice)\b")


def arrays(heads=4, kv_heads=4, batch=4, length=11):
    random = np.random.default_rng(heads + kv_heads)
    shapes = ((batch, heads, length, 8), (batch, kv_heads, length, 8), (batch, kv_heads, length, 6))
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def sharded(x, *axes):
    return jax.device_put(x, NamedSharding(MESH, PartitionSpec(*axes)))


def exact(query, key, value, **options):
    return oracle.attention(*(np.asarray(x, np.float64) for x in (query, key, value)), **options)


def check(placed, tensors, moves=frozenset(), keys_placed=None, **options):
    """attention and its gradients on arrays placed so: the oracle's numbers, and no other messages than these."""
    of_keys = placed if keys_placed is None else keys_placed
    operands = [sharded(x, *axes) for x, axes in zip(tensors, (placed, of_keys, of_keys), strict=True)]
    grad_out = sharded(jnp.ones((*tensors[0].shape[:3], 6), jnp.float32), *placed)
    where = {name: x for name, x in options.items() if hasattr(x, "shape")}
    given = {name: x for name, x in options.items() if name not in where}
    diff = [name for name in ("bias", "sinks") if name in where]

    def run(query, key, value, others, cotangent):
        def call(query, key, value, varying):
            return headway.jax.attention(query, key, value, **given, **others, **varying)

        rest = {name: others.pop(name) for name in diff}
        out, pull = jax.vjp(call, query, key, value, rest)
        return out, pull(cotangent)

    compiled = jax.jit(run).lower(*operands, where, grad_out).compile()
    found = set(MOVES.findall(compiled.as_text()))
    assert found <= set(moves), f"{placed} {list(options)}: {found}"
    out, gradients = compiled(*operands, where, grad_out)
    if not moves:
        assert out.sharding.is_equivalent_to(operands[0].sharding, 4), out.sharding
    numbers = {name: np.asarray(x, np.float64) if x.dtype.kind == "f" else np.asarray(x) for name, x in where.items()}
    expected = exact(*tensors, **given, **numbers)
    near = {"rtol": 2e-5, "atol": 2e-5, "err_msg": f"{placed} {list(options)}"}
    np.testing.assert_allclose(np.asarray(out), expected.out, **near)
    plain = (np.asarray(x, np.float64) for x in (grad_out, *tensors))
    wanted = oracle.gradients(*plain, **given, **numbers)
    for x, name in zip(gradients[:3], ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(np.asarray(x), wanted[name], **near)
    for name in diff:
        np.testing.assert_allclose(np.asarray(gradients[3][name]), wanted[name], rtol=1e-4, atol=1e-4)


def check_numbers():
    same, grouped = arrays(), arrays(heads=4, kv_heads=2)
    for placed in (("x",), (None, "x"), ("x", "y"), (("x", "y"),)):
        check(placed, same, causal=True)
        check(placed, grouped, window=(3, 1), softcap=2.0)
    lens = jnp.asarray([11, 3, 0, 7], jnp.int32)
    check(("x", "y"), same, valid_lens=lens, alibi_slopes=jnp.asarray([0.1, 0.2, 0.3, 0.4], jnp.float32))
    random = np.random.default_rng(5)
    mask = jnp.asarray(random.random((4, 1, 11, 11)) < 0.7)
    bias = jnp.asarray(random.standard_normal((1, 4, 11, 11)), jnp.float32)
    sinks = jnp.asarray(random.standard_normal(4), jnp.float32)
    check(("x", "y"), same, mask=mask)
    # The gradients of what all batch items share are sums over devices, for which operands are gathered.
    moves = {"all-gather", "all-reduce", "dynamic-slice"}
    check(("x", "y"), same, mask=mask, bias=bias, sinks=sinks, moves=moves)


def check_gathers():
    """What cannot be split stays right: heads that a group would be cut by, the sequence, dropout."""
    anything = {"all-gather", "all-to-all", "collective-permute", "all-reduce", "dynamic-slice"}
    check((None, ("x", "y")), arrays(heads=4, kv_heads=2), moves=anything, keys_placed=(), causal=True)
    check((None, None, "x"), arrays(length=12), causal=True, moves=anything)
    check(("x",), arrays(), dropout=0.3, seed=5, moves=anything)


def check_drop_in():
    """(B, T, N, H), with the heads on another axis."""
    tensors = arrays()
    operands = [sharded(jnp.swapaxes(x, 1, 2), "x", None, "y") for x in (*tensors[:2], tensors[1])]
    call = jax.jit(lambda *x: headway.jax.dot_product_attention(*x, is_causal=True))
    assert not MOVES.findall(call.lower(*operands).compile().as_text())
    expected = exact(tensors[0], tensors[1], tensors[1], causal=True).out
    np.testing.assert_allclose(np.swapaxes(call(*operands), 1, 2), expected, rtol=2e-5, atol=2e-5)


def check_vmap():
    query, key, value = (jnp.stack([x, 2 * x]) for x in arrays())
    out = jax.jit(jax.vmap(lambda *x: headway.jax.attention(*x, causal=True)))(query, key, value)
    for n in range(2):
        np.testing.assert_allclose(out[n], exact(query[n], key[n], value[n], causal=True).out, rtol=2e-5, atol=2e-5)


if __name__ == "__main__":
    check_numbers()
    check_gathers()
    check_drop_in()
    check_vmap()
