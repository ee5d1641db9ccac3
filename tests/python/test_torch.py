"""Torch tensors on the CPU: what comes in is what goes out, and nothing is copied."""

import numpy as np
import pytest

import headway
from cases import random_case

torch = pytest.importorskip("torch", reason="torch is not installed")


def as_torch(array):
    return torch.from_numpy(np.ascontiguousarray(array))


@pytest.mark.parametrize("seed", range(20))
def test_torch_gives_numpy_s_bits(seed):
    case = random_case(seed, "float32")
    options = {name: as_torch(v) if isinstance(v, np.ndarray) else v for name, v in case.options.items()}
    inputs = [as_torch(array) for array in case.inputs]
    expected = headway.attention(*case.inputs, **case.options, return_weights=True, return_lse=True)
    found = headway.attention(*inputs, **options, return_weights=True, return_lse=True)
    for one, other in zip(found, expected):
        assert type(one) is torch.Tensor and one.numpy().tobytes() == other.tobytes()
    gradients = headway.attention_backward(found[0], *inputs, found[0], found[2], **options)
    expected = headway.attention_backward(expected[0], *case.inputs, expected[0], expected[2], **case.options)
    for one, other in zip(gradients, expected):
        assert (one is None) == (other is None)
        assert one is None or (type(one) is torch.Tensor and one.numpy().tobytes() == other.tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_torch_types(dtype):
    x = torch.randn(2, 3, 5, 8).to(dtype)
    out, weights, lse = headway.attention(x, x, x, return_weights=True, return_lse=True)
    assert out.dtype == weights.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(*3 * [x.double()])
    torch.testing.assert_close(out.double(), expected, atol=2e-2 if x.element_size() == 2 else 1e-5, rtol=0)
    rows = x[0].transpose(0, 1)
    assert headway.attention_varlen(rows, rows, rows, torch.tensor([0, 5]), torch.tensor([0, 5])).dtype == dtype
    assert headway.attention_scores(x, x).dtype == dtype
    assert headway.multi_head_attention(x[:, 0], x[:, 0], x[:, 0], 2).shape == (2, 5, 8)


def test_torch_strides_and_out():
    x = torch.randn(2, 5, 3, 4).transpose(1, 2)
    expected = headway.attention(*3 * [x.contiguous()])
    out = torch.empty(2, 5, 3, 4)
    returned = headway.attention(x, x, x, out=out.transpose(1, 2))
    assert torch.equal(returned, expected) and torch.equal(out.transpose(1, 2), expected)
    assert headway.attention(*3 * [x.expand(2, 3, 5, 4)[:, :, ::2]]).shape == (2, 3, 3, 4)
    empty = torch.zeros(2, 0, 4)
    assert headway.attention(empty, empty, empty).shape == (2, 0, 4)


def test_tensors_that_require_grad():
    x = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"attention: query requires grad.*headway\.torch.*detach"):
        headway.attention(x, x, x)
    with torch.no_grad():
        assert not headway.attention(x, x, x).requires_grad
    parameter = torch.nn.Parameter(torch.randn(5, 4))
    assert type(headway.attention(*3 * [parameter.detach()])) is torch.Tensor


def test_torch_tensors_that_are_no_plain_memory():
    x = torch.ones(3, 4)
    with pytest.raises(TypeError, match="attention: query has type torch.complex64"):
        headway.attention(x.to(torch.complex64), x, x)
    with pytest.raises(TypeError, match="attention: query has type i64"):
        headway.attention(x.long(), x.long(), x.long())
    with pytest.raises(TypeError, match="attention: query cannot be read through DLPack"):
        headway.attention(x.to("meta"), x, x)
    with pytest.raises(TypeError, match="attention: query cannot be read through DLPack"):
        headway.attention(x.to_sparse(), x, x)


def test_libraries_may_be_mixed_and_the_query_s_wins():
    x = np.random.default_rng(0).standard_normal((5, 4))
    t = torch.from_numpy(x)
    assert type(headway.attention(t, x, x)) is torch.Tensor and type(headway.attention(x, t, t)) is np.ndarray
    out, lse = headway.attention(x, t, x, return_lse=True)
    gradients = headway.attention_backward(out, x, t, x, out, lse)
    assert type(gradients.query) is np.ndarray and type(gradients.key) is torch.Tensor


def test_torch_memory_is_freed():
    import resource

    x = torch.zeros(1, 4, 256, 64)
    for _ in range(20):
        headway.attention(x, x, x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(300):
        headway.attention(x, x, x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_tensor_that_torch_stores_negated_is_refused_by_name():
    negated = torch.randn(4, 4, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    x = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"attention: key is stored negated: pass key\.resolve_neg\(\)"):
        headway.attention(x, negated, x)
    headway.attention(x, negated.resolve_neg(), x)


def test_large_results_share_no_memory_and_live_as_long_as_their_views():
    x = torch.randn(1, 4, 512, 64)
    _, weights = headway.attention(x, x, x, return_weights=True)  # 4 MiB of weights
    row, expected = weights[0, 1, 2], weights[0, 1, 2].clone()
    assert weights.is_contiguous() and weights.sum() == weights.clone().sum()
    _, others = headway.attention(x, x, x, scale=1.0, return_weights=True)
    assert weights.data_ptr() != others.data_ptr()
    del weights
    for _ in range(3):
        headway.attention(x, x, x, scale=1.0, return_weights=True)
    assert torch.equal(row, expected)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_bias_s_gradient_is_computed_only_where_it_is_asked_for(wanted, monkeypatch):
    import headway.torch
    from headway.torch import _core

    asked = []
    real = _core._headway.torch_attention_backward

    def spy(*args):
        asked.append(args[-1])
        return real(*args)

    monkeypatch.setattr(_core._headway, "torch_attention_backward", spy)
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    bias = torch.randn(1, 2, 16, 16, requires_grad=wanted)
    headway.torch.attention(x, x, x, bias=bias).sum().backward()
    assert asked == [wanted] and (bias.grad is not None) == wanted and x.grad is not None
