"""FlashAttention's functions in headway.torch, compared with their rules written out in float64."""

import pytest
import torch

from headway.torch import flash_attn_func, flash_attn_varlen_func

TORCH_TYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def expected(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """out (B, Sq, H, D) and lse (B, H, Sq) in float64, as FlashAttention's documentation says."""
    q, k, v = (x.detach().double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])
    if slopes is not None:
        slopes = slopes.double().reshape(-1, q.shape[1], 1, 1)
        scores = scores - slopes * (i - j).abs()
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        allowed &= j <= i
    if window[0] >= 0:
        allowed &= j >= i - window[0]
    if window[1] >= 0:
        allowed &= j <= i + window[1]
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1)


def tensors(batch=2, queries=5, keys=9, heads=4, kv_heads=2, width=8, dtype=torch.float32):
    torch.manual_seed(0)
    return tuple(
        torch.randn(batch, length, count, width).to(dtype).requires_grad_()
        for length, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )


OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"causal": True, "window_size": (3, -1)},
    {"window_size": (-1, 2)},
    {"softcap": 1.5},
    {"softmax_scale": 0.3, "causal": True},
    {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    {"alibi_slopes": torch.rand(2, 4), "causal": True},
]


def as_expected(options):
    names = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}
    return {names.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("dtype", TORCH_TYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options) or "plain")
def test_the_function_follows_flash_attentions_rules(options, dtype):
    q, k, v = tensors(dtype=dtype)
    out, lse, probabilities = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    right, right_lse = expected(q, k, v, **as_expected(options))
    assert out.dtype == dtype and out.shape == q.shape and probabilities is None
    torch.testing.assert_close(out.detach().double(), right, rtol=0, atol=TORCH_TYPES[dtype])
    torch.testing.assert_close(lse.detach().double(), right_lse, rtol=0, atol=TORCH_TYPES[dtype])
    assert torch.equal(flash_attn_func(q, k, v, **options), out)


@pytest.mark.parametrize("options", OPTIONS[:4] + OPTIONS[-1:], ids=lambda options: ", ".join(options) or "plain")
def test_gradients_are_those_of_the_rules(options):
    q, k, v = tensors()
    grad = torch.randn(q.shape)
    found = torch.autograd.grad(flash_attn_func(q, k, v, **options), (q, k, v), grad)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    q2, k2, v2 = (x.transpose(1, 2) for x in leaves)
    k2, v2 = (x.repeat_interleave(2, dim=1) for x in (k2, v2))
    i, j = torch.arange(5)[:, None] + 4, torch.arange(9)
    left, right = options.get("window_size", (-1, -1))
    allowed = (j >= i - left if left >= 0 else j >= 0) & (j <= i + right if right >= 0 else j >= 0)
    allowed = allowed & (j <= i) if options.get("causal") else allowed
    scores = q2 @ k2.transpose(-2, -1) * 8**-0.5
    if "alibi_slopes" in options:
        scores = scores - options["alibi_slopes"].double()[..., None, None] * (i - j).abs()
    out = (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v2).transpose(1, 2)
    for one, other in zip(found, torch.autograd.grad(out, leaves, grad.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


def test_a_query_before_all_keys_gives_zero():
    q, k, v = tensors(queries=9, keys=5)
    out = flash_attn_func(q, k, v, causal=True)
    assert not out[:, :4].any() and out[:, 4:].any()


def test_dropout_comes_from_torchs_generator():
    q, k, v = tensors(queries=32, keys=32)
    torch.manual_seed(1)
    first = flash_attn_func(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(flash_attn_func(q, k, v, 0.5), first)
    assert not torch.equal(flash_attn_func(q, k, v), first)


@pytest.mark.parametrize("options", OPTIONS[:8], ids=lambda options: ", ".join(options) or "plain")
def test_packed_sequences_are_each_their_own_call(options):
    torch.manual_seed(0)
    starts_q, starts_k = torch.tensor([0, 3, 3, 8], dtype=torch.int32), torch.tensor([0, 6, 7, 13], dtype=torch.int32)
    q, k, v = torch.randn(8, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8)
    out, lse, _ = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 5, 6, return_attn_probs=True, **options)
    assert out.shape == q.shape and lse.shape == (4, 8)
    for b in range(3):
        rows, columns = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        right, right_lse = expected(q[None, rows], k[None, columns], v[None, columns], **as_expected(options))
        torch.testing.assert_close(out[rows].double(), right[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[:, rows].double(), right_lse[0], rtol=0, atol=1e-5)


def test_errors_speak_in_flash_attentions_words():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"^flash_attn_func: k has "):
        flash_attn_func(q, k[..., :4], v)
    with pytest.raises(TypeError, match=r"^flash_attn_func: q is a list"):
        flash_attn_func([1.0], k, v)
    with pytest.raises(ValueError, match=r"^flash_attn_func: window_size left is -2"):
        flash_attn_func(q, k, v, window_size=(-2, 0))
    with pytest.raises(
        ValueError, match=r"^flash_attn_func: window_size is \(3,\), expected a pair \(left, right\), -1 for"
    ):
        flash_attn_func(q, k, v, window_size=(3,))
    with pytest.raises(TypeError, match="unexpected keyword argument 'sm_scale'; did you mean 'softmax_scale'"):
        flash_attn_func(q, k, v, sm_scale=1.0)
    pages = torch.zeros(3, 4, 2, 8)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: block_table\[0, 1\] is 7"):
        flash_attn_varlen_func(q[0].detach(), pages, pages, [0, 5], [0, 8], 5, 8, block_table=torch.tensor([[0, 7]]))
