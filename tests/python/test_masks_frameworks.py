"""Structured masks inside torch and JAX: gradients, compilers, packed sequences, a training run."""

from __future__ import annotations

import runpy

import numpy as np
import pytest

import oracle
from cases import assert_close
from headway import masks
from pages import ROOT

QUERIES, KEYS = 9, 13
MASKS = {
    "prefix": masks.prefix([4, 0]),
    "window and first": masks.window(3, 0) | masks.first(2),
    "blocks": masks.blocks(np.arange(4 * 3 * 5).reshape(4, 3, 5) % 3 == 0, 3),
    "dense and window": masks.dense(np.arange(9 * 13).reshape(9, 13) % 5 < 3) & masks.window(6, 2),
    "dense": masks.dense(np.arange(9 * 13).reshape(9, 13) % 5 < 3),
}


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in ((2, 4, QUERIES, 8), (2, 2, KEYS, 8), (2, 2, KEYS, 6))]


def expected(mask):
    query, key, value = arrays()
    bools = mask.to_bool(QUERIES, KEYS)
    out = oracle.attention(query, key, value, mask=bools).out
    return out, oracle.gradients(np.cos(out), query, key, value, mask=bools)


# ---- torch ----


def torch_inputs(torch):
    return [torch.from_numpy(x).requires_grad_() for x in arrays()]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kind", MASKS)
def test_torch_attention_and_its_gradients(kind, layout):
    torch = pytest.importorskip("torch")
    import headway.torch

    mask = MASKS[kind]
    inputs = torch_inputs(torch)
    given = inputs if layout == "bhsd" else [x.transpose(1, 2) for x in inputs]
    for _ in range(2):  # the second call finds the mask's tensors made
        out = headway.torch.attention(*given, mask=mask, layout=layout)
        out = out if layout == "bhsd" else out.transpose(1, 2)
        wanted, gradients = expected(mask)
        assert_close(out.detach().numpy(), wanted, "float64")
        for x, name in zip(torch.autograd.grad(out, inputs, torch.from_numpy(np.cos(wanted))), gradients):
            assert_close(x.numpy(), gradients[name], "float64", scale=4)


@pytest.mark.parametrize("kind", ["prefix", "dense and window"])
def test_torch_second_derivatives(kind):
    torch = pytest.importorskip("torch")
    import headway.torch

    def second(mask):
        inputs = torch_inputs(torch)
        out = headway.torch.attention(*inputs, mask=mask)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    mask = MASKS[kind]
    for one, other in zip(second(mask), second(torch.from_numpy(mask.to_bool(QUERIES, KEYS)))):
        torch.testing.assert_close(one, other)


def test_torch_without_heads_or_batch():
    torch = pytest.importorskip("torch")
    import headway.torch

    query, key, value = (torch.from_numpy(x)[:, 0] for x in arrays())
    mask = masks.prefix([4, 0])
    out = headway.torch.attention(query, key, value, mask=mask)
    wanted, _ = expected(mask)
    assert_close(out.numpy(), wanted[:, 0], "float64")
    one = headway.torch.attention(query[0], key[0], value[0], mask=masks.prefix(4))
    assert_close(one.numpy(), wanted[0, 0], "float64")


def test_torch_packed_sequences():
    torch = pytest.importorskip("torch")
    import headway.torch

    rows = torch.randn(12, 2, 8, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([0, 5, 12])
    mask = masks.prefix([2, 4]) & masks.window(3, None)
    out = headway.torch.attention_varlen(rows, rows, rows, starts, starts, mask=mask)
    x = rows.detach().numpy()
    plain = headway.attention_varlen(x, x, x, [0, 5, 12], [0, 5, 12], mask=mask)
    assert_close(out.detach().numpy(), plain, "float64")
    out.sum().backward()
    assert rows.grad.isfinite().all()


def test_torch_compiled():
    torch = pytest.importorskip("torch")
    import headway.torch

    mask = masks.window(3, 0) | masks.first(2)
    query, key, value = (torch.from_numpy(x) for x in arrays())
    compiled = torch.compile(lambda q: headway.torch.attention(q * 1.0, key, value, mask=mask) + 1, backend="eager")
    wanted, _ = expected(mask)
    assert_close(compiled(query).numpy() - 1, wanted, "float64")


def test_torch_refuses_what_does_not_fit():
    torch = pytest.importorskip("torch")
    import headway.torch

    inputs = torch_inputs(torch)
    with pytest.raises(ValueError, match="attention: mask has 3 batch items, expected 2 or 1"):
        headway.torch.attention(*inputs, mask=masks.prefix([1, 2, 3]))
    with pytest.raises(ValueError, match="attention: documents has 2 ids, expected one for each of the 9 queries"):
        headway.torch.attention(*inputs, mask=masks.documents([0, 1]))
    with pytest.raises(ValueError, match="attention: found spans and a structured mask, expected one"):
        headway.torch.attention(*inputs, mask=masks.causal(), spans=torch.zeros(9, 1, 2, dtype=torch.int32))


def test_a_model_learns_from_packed_documents_as_it_does_with_bools():
    pytest.importorskip("torch")
    example = runpy.run_path(str(ROOT / "examples/python/train_packed.py"))
    losses = example["train"](25)
    assert losses[-1] < 0.97 * losses[0]
    with_bools = example["train"](5, as_bools=True)
    np.testing.assert_allclose(losses[:5], with_bools, rtol=1e-4)


# ---- JAX ----


@pytest.mark.parametrize("kind", MASKS)
def test_jax_attention_and_its_gradients(kind):
    jax = pytest.importorskip("jax")
    import headway.jax

    mask = MASKS[kind]
    with jax.experimental.enable_x64() if hasattr(jax.experimental, "enable_x64") else jax.enable_x64(True):
        inputs = [jax.numpy.asarray(x) for x in arrays()]
        wanted, gradients = expected(mask)
        out, pull = jax.vjp(jax.jit(lambda *x: headway.jax.attention(*x, mask=mask)), *inputs)
        assert_close(out, wanted, "float64")
        for x, name in zip(pull(jax.numpy.asarray(np.cos(wanted))), gradients):
            assert_close(x, gradients[name], "float64", scale=4)


def test_jax_spans_vmap_and_second_derivatives():
    jax = pytest.importorskip("jax")
    import headway.jax

    mask = masks.blocks(np.tril(np.ones((3, 5), bool)), 3) & masks.window(7, 1)
    array, rows = mask.spans(QUERIES, KEYS)
    bools = mask.to_bool(QUERIES, KEYS)
    query, key, value = (jax.numpy.asarray(x, jax.numpy.float32) for x in arrays())
    one = headway.jax.attention(query, key, value, spans=array, span_rows=rows)
    np.testing.assert_array_equal(one, headway.jax.attention(query, key, value, mask=mask))
    mapped = jax.vmap(lambda q: headway.jax.attention(q, key, value, mask=mask))(jax.numpy.stack([query, 2 * query]))
    np.testing.assert_array_equal(mapped[0], one)

    def second(mask):
        inner = jax.grad(lambda q: headway.jax.attention(q, key, value, mask=mask).sum())
        return jax.grad(lambda q: (inner(q) ** 2).sum())(query)

    np.testing.assert_allclose(second(mask), second(bools), atol=1e-5)


def test_jax_refuses_what_does_not_fit():
    pytest.importorskip("jax")
    import headway.jax

    inputs = [x.astype(np.float32) for x in arrays()]
    with pytest.raises(ValueError, match="attention: mask has 3 batch items, expected 2 or 1"):
        headway.jax.attention(*inputs, mask=masks.prefix([1, 2, 3]))
    with pytest.raises(ValueError, match="attention: documents has 2 ids, expected one for each of the 9 queries"):
        headway.jax.attention(*inputs, mask=masks.documents([0, 1]))
