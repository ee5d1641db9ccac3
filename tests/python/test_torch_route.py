"""headway.torch.activate(): torch's own functions on Headway, and back."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import headway.torch as ht
from headway.torch import route

needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no registry of kernels"
)


@pytest.fixture
def calls(monkeypatch):
    """How often Headway's forward and backward ran, while it is active."""
    counts = {"forward": 0, "backward": 0}

    def counted(name, real):
        def run(*args):
            counts[name] += 1
            return real(*args)

        return run

    compiled = route._headway
    monkeypatch.setattr(compiled, "torch_attention", counted("forward", compiled.torch_attention))
    monkeypatch.setattr(compiled, "torch_attention_backward", counted("backward", compiled.torch_attention_backward))
    ht.activate()
    yield counts
    ht.deactivate()


def leaves(heads=4, kv_heads=4, queries=6, keys=6, width=8, dtype=torch.float32):
    torch.manual_seed(0)
    return [
        torch.randn(2, count, length, width).to(dtype).requires_grad_()
        for count, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    ]


def in_float64(inputs, grad, **options):
    """Torch's own mathematics, which nothing takes the place of: out and the three gradients."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options = options | {"attn_mask": mask.double()}
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*wide, **options)
    return (out, *torch.autograd.grad(out, wide, grad.double()))


SDPA = [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"attn_mask": torch.arange(6) < torch.arange(1, 7)[:, None]},
    {"attn_mask": torch.linspace(-1, 1, 36).reshape(6, 6)},
]


@needs_registry
@pytest.mark.parametrize("options", SDPA, ids=lambda options: ", ".join(options) or "plain")
def test_torchs_function_runs_on_headway(options, calls):
    inputs = leaves()
    grad = torch.randn(2, 4, 6, 8)
    out = F.scaled_dot_product_attention(*inputs, **options)
    found = (out, *torch.autograd.grad(out, inputs, grad))
    assert calls == {"forward": 1, "backward": 1}
    for one, other in zip(found, in_float64(inputs, grad, **options), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


@needs_registry
def test_grouped_heads_and_other_lengths_run_too(calls):
    inputs = leaves(kv_heads=2, keys=9)
    grad = torch.randn(2, 4, 6, 8)
    out = F.scaled_dot_product_attention(*inputs, enable_gqa=True)
    found = (out, *torch.autograd.grad(out, inputs, grad))
    assert calls["forward"] == 1
    for one, other in zip(found, in_float64(inputs, grad, enable_gqa=True), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


@needs_registry
def test_a_compiled_function_runs_on_headway_and_keeps_its_memory_order(calls):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves()]
    grad = torch.randn(2, 4, 6, 8)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    out, expected = compiled(*inputs), attend(*inputs)
    assert torch.equal(out, expected) and out.stride() == expected.stride() and calls["forward"] == 2
    for one, other in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        assert torch.equal(one, other)


@needs_registry
def test_deactivate_gives_torch_its_kernels_back(calls):
    inputs = leaves()
    ht.deactivate()
    own = F.scaled_dot_product_attention(*inputs)
    assert calls["forward"] == 0 and torch.nn.attention.current_flash_attention_impl() is None
    ht.activate()
    ht.activate()
    F.scaled_dot_product_attention(*inputs)
    assert calls["forward"] == 1 and torch.nn.attention.current_flash_attention_impl() == "Headway"
    ht.deactivate()
    ht.deactivate()
    assert torch.equal(F.scaled_dot_product_attention(*inputs), own) and calls["forward"] == 1


# ---- The operators of torch's CUDA kernels, whose Python is the same on any device ----


def test_the_dense_operator_aligns_the_causal_rule_to_the_last_key():
    q, k, v = (x.detach() for x in leaves(queries=3, keys=7))
    out, lse, *rest = route._sdpa_forward(q, k, v, 0.0, True, False, scale=None)
    allowed = torch.arange(7) <= torch.arange(3)[:, None] + 4
    expected = in_float64((q, k, v), torch.randn_like(q), attn_mask=allowed)
    torch.testing.assert_close(out.double(), expected[0], rtol=0, atol=1e-5)
    assert lse.shape == (2, 4, 3) and rest[2:4] == [3, 7]
    grad = torch.randn_like(q)
    found = route._sdpa_backward(grad, q, k, v, out, lse, None, None, 3, 7, 0.0, True, rest[4], rest[5], scale=None)
    for one, other in zip(found, in_float64((q, k, v), grad, attn_mask=allowed)[1:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


def test_dropout_is_the_same_in_backward():
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 1, 16, 4) for _ in range(3))
    out, lse, *rest = route._sdpa_forward(q, k, v, 0.5, False, False)
    seed = int(rest[4][0]) % 2**64
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    expected = ht.attention(*x, dropout=0.5, seed=seed)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    found = route._sdpa_backward(grad, q, k, v, out, lse, None, None, 16, 16, 0.5, False, rest[4], rest[5])
    for one, other in zip(found, torch.autograd.grad(expected, x, grad), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (None, None)])
def test_the_packed_operator_is_flash_attn_varlen_func(window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(11, 2, 8, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 4, 11], dtype=torch.int32)
    sides = tuple(-1 if side is None else side for side in window)
    expected = ht.flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, causal=True, window_size=sides)
    a, b, c = (x.detach() for x in (q, k, v))
    keywords = {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, seed, unused, _ = route._flash_forward(a, b, c, starts, starts, 7, 7, 0.0, True, False, **keywords)
    assert torch.equal(out, expected) and lse.shape == (2, 11)
    place = torch.zeros_like(out)
    assert torch.equal(
        route._flash_forward_inplace(place, a, b, c, starts, starts, 7, 7, 0.0, True, False, **keywords), lse
    )
    assert torch.equal(place, out)
    grad = torch.randn_like(out)
    found = route._flash_backward(grad, a, b, c, out, lse, starts, starts, 7, 7, 0.0, True, seed, unused, **keywords)
    for one, other in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert torch.equal(one, other)


def test_without_bounds_the_packed_operator_takes_heads_third():
    q, k, v = (torch.randn(2, 5, 4, 8) for _ in range(3))
    out, lse, *_ = route._flash_forward(q, k, v, None, None, 5, 5, 0.0, False, False)
    assert torch.equal(out, ht.flash_attn_func(q, k, v)) and lse.shape == (2, 4, 5)
