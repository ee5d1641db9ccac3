"""Structured masks and spans with tensors on a CUDA device, against the float64 oracle. Skipped without one."""

from __future__ import annotations

import numpy as np
import pytest

import headway
import oracle
from headway import masks
from torch_support import no_cuda

pytestmark = pytest.mark.skipif(no_cuda() is not None, reason=str(no_cuda()))
torch = pytest.importorskip("torch", reason="torch is not installed")

LENGTH, HEADS, DIM = 300, 4, 64
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
MASKS = {
    "documents and causal": masks.documents(np.arange(LENGTH) // 130) & masks.causal(),
    "window and first": masks.window(70, 0) | masks.first(4),
    "prefix": masks.prefix([90, 200]) | masks.causal(),
    "blocks of each head": masks.blocks(np.arange(HEADS * 3 * 3).reshape(HEADS, 3, 3) % 3 == 0, 100),
    "tree": masks.tree([-1, *[i // 2 for i in range(LENGTH - 1)]]),
}


def inputs(dtype):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, heads, LENGTH, DIM)) for heads in (HEADS, 2, 2)]
    tensors = [torch.from_numpy(x).cuda().to(getattr(torch, dtype)) for x in arrays]
    return tensors, [x.double().cpu().numpy() for x in tensors]


def assert_near(found, exact, dtype):
    np.testing.assert_allclose(found.double().cpu().numpy(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", MASKS)
def test_masks_give_the_oracle_s_results_and_gradients(kind, dtype):
    import headway.torch

    tensors, exact_inputs = inputs(dtype)
    leaves = [x.requires_grad_() for x in tensors]
    bools = MASKS[kind].to_bool(LENGTH, LENGTH)
    out = headway.torch.attention(*leaves, mask=MASKS[kind])
    exact = oracle.attention(*exact_inputs, mask=bools).out
    assert_near(out.detach(), exact, dtype)
    grad = torch.from_numpy(np.cos(exact)).cuda().to(out.dtype)
    found = torch.autograd.grad(out, leaves, grad)
    wanted = oracle.gradients(grad.double().cpu().numpy(), *exact_inputs, mask=bools)
    for one, name in zip(found, ("query", "key", "value"), strict=True):
        assert_near(one, wanted[name], dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_spans_on_the_device_are_cut_to_the_keys(dtype):
    tensors, exact_inputs = inputs(dtype)
    rows = torch.arange(LENGTH, device="cuda")
    spans = torch.stack(
        [torch.stack([rows - 50, rows + 1], -1), torch.stack([rows * 0 + 290, rows * 0 + 10**9], -1)], 1
    )
    out = headway.attention(*tensors, spans=spans)
    bools = np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-51, dtype=bool)
    bools[:, 290:] = True
    assert_near(out, oracle.attention(*exact_inputs, mask=bools).out, dtype)


def test_the_layers_of_a_model_and_a_captured_graph_share_a_mask_s_spans_on_the_device():
    import headway.torch
    from headway.torch import _structured

    tensors, _ = inputs("bfloat16")
    mask = masks.documents(np.arange(LENGTH) // 130) & masks.causal()
    expected = headway.torch.attention(*tensors, mask=mask)
    spans = _structured._last[mask][1][0]
    assert spans.is_cuda
    assert torch.equal(headway.torch.attention(*tensors, mask=mask), expected)
    assert _structured._last[mask][1][0] is spans  # neither made nor sent again
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = headway.torch.attention(*tensors, mask=mask)
    tensors[2].neg_()
    graph.replay()
    assert torch.equal(out, -expected)
