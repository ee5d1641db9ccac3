"""headway.torch.scaled_dot_product_attention against torch's own, over torch's options and torch's own samples."""

import itertools
import math
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import headway.torch  # noqa: E402
from headway.torch import scaled_dot_product_attention as ours  # noqa: E402
from torch_support import one_thread  # noqa: E402, F401

# How far a result of moderate size may be from float64: a few roundings of the type.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}

# query, key and value: leading axes and lengths; all widths 8, the last one 8 or 5.
SHAPES = {
    "square": ((2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "cross": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
    "long queries": ((2, 2, 9, 8), (2, 2, 4, 8), (2, 2, 4, 8)),
    "value width": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 5)),
    "no heads": ((3, 5, 8), (3, 9, 8), (3, 9, 8)),
    "no batch": ((5, 8), (9, 8), (9, 8)),
    "two batch axes": ((2, 3, 2, 5, 8), (2, 3, 2, 9, 8), (2, 3, 2, 9, 8)),
    "one head of keys": ((2, 4, 5, 8), (2, 1, 9, 8), (2, 1, 9, 8)),
    "no batch in the query": ((4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)),
    "batches broadcast": ((2, 1, 4, 5, 8), (3, 4, 9, 8), (1, 3, 4, 9, 8)),
    "grouped": ((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8)),
    "grouped, no batch": ((4, 5, 8), (2, 9, 8), (2, 9, 8)),
    "grouped unlike": ((2, 4, 5, 8), (2, 2, 9, 8), (2, 1, 9, 8)),
    "empty": ((2, 0, 5, 8), (2, 0, 9, 8), (2, 0, 9, 8)),
}
MASKS = ["none", "bool matrix", "bool full", "bool keys", "float matrix", "float full", "float keys"]
LAYOUTS = ["contiguous", "transposed"]
SCALES = [None, 0.7]
CAUSAL = [False, True]


def make(shape, layout, dtype):
    if layout == "transposed" and len(shape) > 2:
        swapped = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        return torch.randn(swapped, dtype=torch.float64).transpose(-2, -3).to(dtype).requires_grad_()
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def make_mask(kind, leading, queries, keys, dtype):
    shape = {"matrix": (queries, keys), "full": (*leading, queries, keys), "keys": (*[1] * len(leading), 1, keys)}
    if kind == "none":
        return None
    style, which = kind.split()
    if style == "float":
        return torch.randn(shape[which], dtype=torch.float64).to(dtype).requires_grad_()
    mask = torch.rand(shape[which]) < 0.6
    mask[..., 0] = True  # torch gives NaN where nothing is allowed
    return mask


def run(function, inputs, mask, **options):
    """Out, and the gradients of a sum with weights that do not depend on the type."""
    out = function(*inputs, attn_mask=mask, **options)
    torch.manual_seed(7)
    weights = torch.randn(out.shape, dtype=torch.float64)
    wanted = [x for x in (*inputs, mask) if x is not None and x.requires_grad]
    return out, torch.autograd.grad((out.double() * weights).sum(), wanted, materialize_grads=True)


def in_float64(x):
    return None if x is None else x.detach().double().requires_grad_() if x.is_floating_point() else x


def assert_close(found, expected, dtype, case, slack=1):
    assert found.shape == expected.shape and found.dtype == dtype, (case, found.shape, expected.shape, found.dtype)
    size = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    error = (found.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= slack * TOLERANCE[dtype] * size, (case, error, size)


def test_a_grid_of_options_gives_torch_s_results_and_gradients(one_thread):  # noqa: F811
    ran, refused_by_torch = 0, 0
    grid = itertools.product(SHAPES, MASKS, CAUSAL, LAYOUTS, SCALES, TOLERANCE)
    for index, case in enumerate(grid):
        shape, kind, causal, layout, scale, dtype = case
        if index % 5 != 0:  # every pair of options still meets: the numbers of choices have no factor of 5
            continue
        torch.manual_seed(index)
        inputs = [make(sizes, layout, dtype) for sizes in SHAPES[shape]]
        grouped = shape.startswith("grouped")
        leads = [
            sizes[:-2] if not grouped or part == 0 else (*sizes[:-3], 1) for part, sizes in enumerate(SHAPES[shape])
        ]
        mask = make_mask(kind, torch.broadcast_shapes(*leads), inputs[0].shape[-2], inputs[1].shape[-2], dtype)
        options = {"is_causal": causal, "scale": scale, "enable_gqa": grouped}
        out, grads = run(ours, inputs, mask, **options)
        exact = [in_float64(x) for x in inputs]
        try:
            expected, wanted = run(F.scaled_dot_product_attention, exact, in_float64(mask), **options)
        except RuntimeError as error:
            assert causal and mask is not None and "attn_mask should not be set" in str(error), (case, error)
            refused_by_torch += 1
            expected, wanted = run(torch_with_both, exact, in_float64(mask), **options)
        for one, other in zip((out, *grads), (expected, *wanted), strict=True):
            assert_close(one, other, dtype, case)
        ran += 1
    print(
        f"{ran} combinations agree with torch, none is refused; {refused_by_torch} of them torch refuses: attn_mask "
        "together with is_causal, which were compared with torch's result for both in one mask"
    )
    assert ran == 628 and 0 < refused_by_torch < ran / 2


def torch_with_both(query, key, value, attn_mask, is_causal, **options):
    """A mask and causal at once, for torch's kernels that do not take the two."""
    assert is_causal
    triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask.dtype == torch.bool:
        attn_mask = attn_mask & triangle
    else:
        attn_mask = attn_mask.masked_fill(~triangle, -math.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)


SAMPLES_SLACK = 4  # the samples' numbers go up to 9, and so their scores to hundreds


def opinfo(name):
    pytest.importorskip("expecttest", reason="torch's samples need expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == name)


@pytest.mark.filterwarnings("ignore")  # the samples' module warns about what is not installed
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_torch_s_own_samples(one_thread, dtype):  # noqa: F811
    samples = list(opinfo("nn.functional.scaled_dot_product_attention").sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) >= 25
    for sample in samples:
        inputs, options = [sample.input, *sample.args], dict(sample.kwargs)
        mask, dropout = options.pop("attn_mask", None), options.pop("dropout_p")
        if dropout > 0:
            check_dropout(inputs, dropout, **options)
            continue
        out, grads = run(ours, inputs, mask, **options)
        expected, wanted = run(
            F.scaled_dot_product_attention, [in_float64(x) for x in inputs], in_float64(mask), **options
        )
        for one, other in zip((out, *grads), (expected, *wanted), strict=True):
            assert_close(one, other, dtype, sample, SAMPLES_SLACK)


def check_dropout(inputs, dropout, **options):
    """torch.manual_seed decides what is dropped; what is kept is scaled, forward and backward."""
    query, key, _ = inputs
    keys = key.shape[-2]
    identity = torch.eye(keys, dtype=query.dtype).expand(*key.shape[:-2], keys, keys)
    torch.manual_seed(3)
    dropped = ours(query, key, identity, dropout_p=dropout, **options)
    weights = ours(query.double(), key.double(), identity.double(), **options)
    kept, allowed = dropped != 0, weights > 1e-6
    assert 0.2 < (kept & allowed).sum() / allowed.sum() < 0.8 and not (kept & (weights == 0)).any()
    assert_close(dropped, torch.where(kept, weights / (1 - dropout), 0), query.dtype, "kept", SAMPLES_SLACK)
    torch.manual_seed(3)
    out, grads = run(lambda *x, **o: ours(*x, dropout_p=dropout, **o), inputs, None, **options)
    torch.manual_seed(3)
    exact = [in_float64(x) for x in inputs]
    masked = ours(*exact[:2], identity.double(), dropout_p=dropout, **options)
    assert_close(out, (masked @ exact[2]).detach(), query.dtype, "out", SAMPLES_SLACK)
    torch.manual_seed(3)
    expected, wanted = run(lambda *x, **o: ours(*x, dropout_p=dropout, **o), exact, None, **options)
    for one, other in zip((out, *grads), (expected, *wanted), strict=True):
        assert_close(one, other, query.dtype, "gradients", SAMPLES_SLACK)


def test_a_row_without_a_key_gives_zero_and_no_nan_gradient():
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    bias = torch.zeros(4, 4).masked_fill(~mask, -math.inf).requires_grad_()
    for given in (mask, bias):
        out = ours(x, x, x, attn_mask=given)
        assert (out[:, :, 1] == 0).all() and out.isfinite().all()
        out.square().sum().backward()
        assert x.grad.isfinite().all()
    assert bias.grad.isfinite().all() and (bias.grad[1] == 0).all()
    assert F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, :, 1].abs().sum().nan_to_num(0) == 0


def test_a_float32_mask_serves_half_types():
    x = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    mask = torch.randn(5, 5, requires_grad=True)
    ours(x, x, x, attn_mask=mask).float().sum().backward()
    assert mask.grad.dtype == torch.float32 and mask.grad.shape == (5, 5)


def test_scales_that_torch_makes_nan_of():
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    weights = torch.softmax((-0.4 * x @ x.mT).masked_fill(torch.ones(5, 5).triu(1) == 1, -math.inf), -1)
    torch.testing.assert_close(ours(x, x, x, is_causal=True, scale=-0.4), weights @ x)
    assert torch.allclose(ours(x, x, x, scale=0), x.mean(dim=-2, keepdim=True).expand_as(x))


@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_of_torch_is_a_mask(kind):
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8)
    found = headway.torch.scaled_dot_product_attention(query, key, key, kind(5, 9))
    expected = F.scaled_dot_product_attention(query, key, key, attn_mask=kind(5, 9)._materialize())
    assert torch.allclose(found, expected, atol=1e-5)
    with torch.no_grad(), headway.torch.record(torch.nn.Identity()) as recording:
        F.scaled_dot_product_attention(query, key, key, attn_mask=kind(5, 9))
    assert len(recording.calls) == 1


def test_sizes_of_zero():
    for shapes in (((0, 2, 3, 4),) * 3, ((1, 2, 0, 4),) * 3, ((1, 2, 3, 0),) * 3, ((2, 3, 4), (2, 0, 4), (2, 0, 4))):
        inputs = [torch.ones(shape, requires_grad=True) for shape in shapes]
        out = ours(*inputs)
        assert out.shape == (*shapes[0][:-1], shapes[2][-1]) and out.isfinite().all()
        out.sum().backward()
        assert all(x.grad.shape == x.shape for x in inputs)


REFUSED = [
    (TypeError, "key has type torch.float64, query has torch.float32", {"key": torch.ones(2, 5, 8).double()}),
    (TypeError, "value has type torch.float16", {"value": torch.ones(2, 5, 8).half()}),
    (TypeError, "type", {"query": torch.ones(2, 5, 8).int(), "key": torch.ones(2, 5, 8).int(), "value": None}),
    (ValueError, r"query has shape \(8,\), expected \(..., length, width\)", {"query": torch.ones(8)}),
    (ValueError, r"query has shape \(8,\), expected", {"query": torch.ones(8), "key": torch.ones(8), "value": None}),
    (ValueError, r"key has shape \(8,\), expected", {"key": torch.ones(8), "value": None}),
    (ValueError, "leading axes do not broadcast", {"key": torch.ones(3, 5, 8)}),
    (ValueError, "head_dim 9", {"key": torch.ones(2, 5, 9)}),
    (ValueError, "length", {"value": torch.ones(2, 6, 8)}),
    (ValueError, "dropout_p is 1.5, expected 0 to 1", {"dropout_p": 1.5}),
    (ValueError, "scale is nan", {"scale": float("nan")}),
    (TypeError, "scale is '1', expected a number", {"scale": "1"}),
    (TypeError, "dropout_p is None, expected a number", {"dropout_p": None}),
    (TypeError, "query is a list, expected a torch.Tensor", {"query": [[1.0]]}),
    (TypeError, "attn_mask is a list, expected a torch.Tensor", {"attn_mask": [True]}),
    (TypeError, "attn_mask is a Mask, .*; headway.torch.attention takes it", {"attn_mask": headway.masks.causal()}),
    (ValueError, "is a CausalBias of 5 queries and 6 keys, found 5 and 5", {"attn_mask": causal_lower_right(5, 6)}),
    (ValueError, "is a CausalBias, expected is_causal=F", {"attn_mask": causal_lower_right(5, 5), "is_causal": True}),
    (TypeError, "attn_mask has type torch.int64, expected bool", {"attn_mask": torch.ones(5, 5).long()}),
    (ValueError, r"attn_mask has shape \(5, 6\), which does not broadcast", {"attn_mask": torch.ones(5, 6)}),
    (ValueError, "shape", {"attn_mask": torch.ones(1, 1, 1, 5, 5)}),
    (
        ValueError,
        "query has 3 heads, expected a multiple of key's 2",
        {"query": torch.ones(3, 5, 8), "enable_gqa": True},
    ),
    (ValueError, r"expected heads", {"query": torch.ones(5, 8), "enable_gqa": True}),
    (TypeError, "unexpected keyword argument 'atn_mask'; did you mean 'attn_mask'", {"atn_mask": None}),
    (TypeError, "unexpected keyword argument 'causal'; did you mean 'is_causal'", {"causal": True}),
]


@pytest.mark.parametrize("error, text, options", REFUSED)
def test_what_cannot_be_is_named(error, text, options):
    arguments = {name: torch.ones(2, 5, 8) for name in ("query", "key", "value")} | options
    arguments["value"] = arguments["key"] if arguments["value"] is None else arguments["value"]
    with pytest.raises(error, match=f"^scaled_dot_product_attention.*{text}"):
        ours(**arguments)


def nested(*lengths, heads=4, width=8, grad=False):
    """A nested (B, H, j, D), and its items (H, length, D)."""
    items = [torch.randn(length, heads, width, requires_grad=grad) for length in lengths]
    whole = torch.nested.as_nested_tensor(items, layout=torch.jagged).transpose(1, 2)
    return whole, items


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_nested_tensors_are_items_of_their_own_lengths(causal, kv_heads):
    (q, q_items), (k, k_items), (v, v_items) = (
        nested(5, 1, 9, heads=heads, grad=True) for heads in (4, kv_heads, kv_heads)
    )
    out = ours(q, k, v, is_causal=causal, enable_gqa=kv_heads < 4)
    assert out.is_nested and out.shape[0] == 3 and out.shape[1] == 4
    sum(item.square().sum() for item in out.unbind()).backward()
    for n, item in enumerate(out.unbind()):
        parts = [x[n].detach().requires_grad_() for x in (q_items, k_items, v_items)]
        expected = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in parts), is_causal=causal, enable_gqa=True
        )[0]
        torch.testing.assert_close(item, expected, atol=1e-5, rtol=1e-5)
        expected.square().sum().backward()
        for mine, theirs in zip((q_items[n], k_items[n], v_items[n]), parts):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_cannot_be_packed_are_refused():
    whole, _ = nested(5, 2)
    few, _ = nested(5, 2, heads=2)
    strided = torch.nested.nested_tensor([torch.ones(4, 5, 8)])
    for arguments, error, text in [
        ((whole, whole, torch.ones(1, 4, 5, 8)), NotImplementedError, "value is no nested tensor, and the others are"),
        ((torch.ones(1, 4, 5, 8), whole, whole), NotImplementedError, "key is nested, and query is not"),
        ((strided, strided, strided), NotImplementedError, "query is nested with the layout torch.strided"),
        ((whole, whole, whole, torch.ones(5, 5)), NotImplementedError, "attn_mask is given with nested tensors"),
        ((whole, few, few), ValueError, "need enable_gqa=True"),
    ]:
        with pytest.raises(error, match=f"^scaled_dot_product_attention: .*{text}"):
            ours(*arguments)


def test_results_lie_in_memory_as_the_query_does():
    x = torch.randn(2, 6, 4, 8).transpose(1, 2)
    assert ours(x, x, x).transpose(1, 2).is_contiguous()
    assert torch.equal(ours(x, x, x), ours(*3 * [x.contiguous()]))
    x = torch.randn(6, 2, 4, 8).permute(1, 2, 0, 3)
    assert ours(x, x, x).permute(2, 0, 1, 3).is_contiguous()
    x = torch.randn(6, 8).expand(2, 4, 6, 8)
    assert torch.equal(ours(x, x, x), ours(*3 * [x.contiguous()]))


def test_grouped_heads_are_told_of_enable_gqa():
    query, key = torch.randn(1, 8, 4, 16), torch.randn(1, 2, 4, 16)
    with pytest.raises(ValueError, match="8 for 2, need enable_gqa=True"):
        ours(query, key, key)
    with pytest.raises(ValueError) as other:
        ours(query, key[:, :, :, :], torch.randn(1, 3, 4, 16), enable_gqa=True)
    assert "enable_gqa" not in str(other.value)


def test_what_no_engine_can_run_is_refused_in_the_function_s_own_name(monkeypatch):
    """As for tensors on a GPU in a build without CUDA."""
    from headway import _headway

    def refuse(name):
        def call(*_, **__):
            raise NotImplementedError(f"{name}: no engine can run this (cuda: not built into this library)")

        return call

    for name in ("plain_attention", "attention", "torch_attention"):  # whichever of them it calls
        monkeypatch.setattr(_headway, name, refuse("attention" if name == "torch_attention" else name), raising=False)
    monkeypatch.setattr(sys.modules["headway.torch.sdpa"], "torch_sdpa", lambda *_: None)  # its answer then
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="^scaled_dot_product_attention: no engine .* not built into"):
        ours(x, x, x)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}, {"attn_mask": torch.eye(4) > 0}])
def test_a_checkpointed_call_may_be_the_last_of_its_region(options):
    """torch ends the recomputation there, by an exception from the hook that saves tensors."""
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 3, 4, 8)
    gradients = []
    for function in (ours, lambda *inputs, **options: checkpoint(ours, *inputs, use_reentrant=False, **options)):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        function(leaf, leaf, leaf, **options).square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_what_a_hook_of_saved_tensors_raises_arrives_as_it_is():
    def full(_):
        calls.append(1)
        raise OSError("the disk is full")

    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    calls = []
    with torch.autograd.graph.saved_tensors_hooks(full, full), pytest.raises(OSError, match="^the disk is full$"):
        ours(x, x, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, full):
        out = ours(x, x, x)
    with pytest.raises(OSError, match="^the disk is full$"):
        out.sum().backward()
    assert len(calls) == 2  # once each


def test_symbolic_traces_hold_it_as_one_call():
    class Model(torch.nn.Module):
        def forward(self, query, key, attn_mask):
            return ours(query, key, key * 2, attn_mask, is_causal=True)

    traced = torch.fx.symbolic_trace(Model())
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"][1:] == [ours]
    query, key, attn_mask = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    assert torch.equal(traced(query, key, attn_mask), Model()(query, key, attn_mask))
