"""headway.torch.attention and its operators: gradients, torch.compile, autocast, torch.func, and what is refused."""

import copy
import inspect
import math

import numpy as np
import pytest

import headway
from cases import random_case

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count  # noqa: E402

import headway.torch as ht  # noqa: E402
from headway.torch import _ops  # noqa: E402
from headway.torch._core import Options  # noqa: E402
from torch_support import one_thread  # noqa: E402, F401

# Torch's own forward mode compiles its formulas with it.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def draw(*shape, dtype=torch.float64, grad=True):
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


def as_torch(value):
    return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value


# ---- The same call as headway.attention ----


def test_the_options_are_headway_s():
    def names(function):
        return [name for name in inspect.signature(function).parameters if name != "unknown"]

    assert names(ht.attention) == names(headway.attention)
    missing = {"return_weights", "out"}  # weights have no one shape there, and a place for out has nothing to save
    assert [n for n in names(headway.attention_varlen) if n not in missing] == names(ht.attention_varlen)


def test_heads_may_come_after_the_sequence():
    query, key, value = torch.randn(2, 9, 6, 16), torch.randn(2, 11, 3, 16), torch.randn(2, 11, 3, 8)
    swapped = [x.transpose(1, 2).clone().requires_grad_() for x in (query, key, value)]
    given = [x.clone().requires_grad_() for x in (query, key, value)]
    expected, expected_lse = ht.attention(*swapped, causal="bottom_right", return_lse=True)
    out, lse = ht.attention(*given, causal="bottom_right", return_lse=True, layout="bshd", batch_invariant=True)
    assert out.shape == (2, 9, 6, 8) and out.is_contiguous()
    assert torch.equal(out.transpose(1, 2), expected) and torch.equal(lse, expected_lse)
    out.square().sum().backward()
    expected.square().sum().backward()
    for x, other in zip(given, swapped):
        assert torch.equal(x.grad.transpose(1, 2), other.grad)
    place = torch.empty(2, 9, 6, 8)
    assert ht.attention(query, key, value, causal="bottom_right", layout="bshd", out=place) is place
    assert torch.equal(place, out)
    with pytest.raises(ValueError, match="attention: layout is 'sbhd', expected 'bhsd' or 'bshd'"):
        ht.attention(query, key, value, layout="sbhd")


@pytest.mark.parametrize("seed", range(40))
def test_results_and_gradients_are_headway_s_bits(seed):
    case = random_case(seed, ["float32", "float64", "float16"][seed % 3])
    inputs = [as_torch(x).requires_grad_() for x in case.inputs]
    options = {name: as_torch(value) for name, value in case.options.items()}
    for name in ("bias", "sinks"):
        if name in options:
            options[name].requires_grad_()
    expected = headway.attention(*case.inputs, **case.options, return_weights=True, return_lse=True)
    found = ht.attention(*inputs, **options, return_weights=True, return_lse=True)
    for one, other in zip(found, expected):
        assert one.detach().numpy().tobytes() == np.ascontiguousarray(other).tobytes()
    wanted = {"query": inputs[0], "key": inputs[1], "value": inputs[2]}
    wanted |= {name: options[name] for name in ("bias", "sinks") if name in options}
    grads = torch.autograd.grad(found[0], list(wanted.values()), torch.ones_like(found[0]))
    ones = np.ones_like(expected[0])
    other = headway.attention_backward(ones, *case.inputs, expected[0], expected[2], **case.options)
    for name, one in zip(wanted, grads):
        assert one.numpy().tobytes() == np.ascontiguousarray(getattr(other, name)).tobytes(), name
    alone = ht.attention(
        *(x.detach() for x in inputs), **{n: v.detach() if n in wanted else v for n, v in options.items()}
    )
    assert torch.equal(alone.nan_to_num(), found[0].nan_to_num())


def test_packed_sequences():
    rows, starts = draw(9, 4, 8), torch.tensor([0, 4, 4, 9])
    keys = draw(9, 2, 8)
    out, lse = ht.attention_varlen(rows, keys, keys, starts, starts, causal=True, return_lse=True)
    assert lse.shape == (4, 9)
    alone = ht.attention(*(x[4:].transpose(0, 1)[None] for x in (rows, keys, keys)), causal=True)
    assert torch.equal(out[4:].transpose(0, 1), alone[0])
    grads = torch.autograd.grad(out[4:].square().sum(), (rows, keys))
    expected = torch.autograd.grad(alone.square().sum(), (rows, keys))
    for one, other in zip(grads, expected):
        torch.testing.assert_close(one, other)
    function = lambda q, k: ht.attention_varlen(q, k, k, [0, 4, 9], starts[[0, 1, 3]], return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(function, (rows, keys))
    with pytest.raises(NotImplementedError, match="no second derivative of packed sequences"):
        (first,) = torch.autograd.grad(function(rows, keys)[0].square().sum(), rows, create_graph=True)
        first.sum().backward()


# ---- Gradients ----

CASES = {  # for query (1, 2, 3, 2), key and value (1, 1, 4, 2 or 3)
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (1, 1), "valid_lens": [3]},
    "softcap": {"softcap": 1.5, "alibi_slopes": [0.1, 0.4]},
    "rows without keys": {"valid_lens": [[0, 4, 4]], "query_lens": [2]},
    "masked": {"mask": torch.arange(12).reshape(3, 4) % 3 > 0},
}


@forward_mode
@pytest.mark.parametrize("extra", [False, True], ids=["no bias", "bias and sinks"])
@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_first_and_second_order(one_thread, name, extra):  # noqa: F811
    torch.manual_seed(0)
    inputs = [draw(1, 2, 3, 2), draw(1, 1, 4, 2), draw(1, 1, 4, 3)]
    inputs += [draw(2, 1, 4), draw(2)] if extra else []

    def function(query, key, value, bias=None, sinks=None):
        out, weights, lse = ht.attention(
            query, key, value, bias=bias, sinks=sinks, return_weights=True, return_lse=True, **CASES[name]
        )
        return out, weights, lse.masked_fill(weights.sum(dim=-1) == 0, 0.0)  # -inf, or the sink, which has no gradient

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@forward_mode
@pytest.mark.parametrize("rank", [2, 3])
def test_derivatives_without_heads_or_batch(rank):
    torch.manual_seed(1)
    inputs = [draw(*(2, 4, 3)[3 - rank :]), draw(*(2, 5, 3)[3 - rank :]), draw(*(2, 5, 3)[3 - rank :]), draw(1)]
    function = lambda q, k, v, s: ht.attention(q, k, v, sinks=s, return_weights=True, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_dropout_has_first_derivatives_and_says_that_it_has_no_second():
    inputs = [draw(1, 2, 4, 3) for _ in range(3)]
    function = lambda *x: ht.attention(*x, dropout=0.4, seed=5, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs)
    (first,) = torch.autograd.grad(function(*inputs)[0].square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative with dropout, found dropout=0.4"):
        first.sum().backward()


@forward_mode
def test_forward_mode_keeps_the_bits_and_loses_no_tangent():
    x, direction = draw(2, 4, 5, 8, grad=False), draw(2, 4, 5, 8, grad=False)
    calls = {
        "attention": lambda x: ht.attention(x, x[:, :2], x[:, :2], causal=True),
        "sdpa": lambda x: ht.scaled_dot_product_attention(x, x, x),  # which has a shortest way of its own
        "half": lambda x: ht.attention(x.half(), x.half(), x.half(), softcap=5.0).double(),
    }
    for name, call in calls.items():
        along = lambda step, call=call: call(x + step * direction)  # noqa: E731
        expected = torch.func.jacrev(along)(torch.zeros((), dtype=x.dtype))
        for requires_grad in (False, True):
            with forward_ad.dual_level():
                given = forward_ad.make_dual(x.clone().requires_grad_(requires_grad), direction)
                out, tangent = forward_ad.unpack_dual(call(given))
                assert torch.equal(out, call(x)), name
                assert torch.equal(call(x), out)  # inside the level, without a tangent
            torch.testing.assert_close(tangent, expected, atol=1e-2 if name == "half" else 1e-12, rtol=1e-2)
    layer = ht.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    step = lambda x: layer(x, x, x, need_weights=False)[0]  # noqa: E731
    _, tangent = torch.func.jvp(step, (x[0],), (direction[0],))
    with forward_ad.dual_level():
        given = forward_ad.make_dual(x[0], direction[0])
        torch.testing.assert_close(forward_ad.unpack_dual(step(given)).tangent, tangent)
    torch.testing.assert_close(step(x[0] + 1e-6 * direction[0]) - step(x[0]), 1e-6 * tangent, atol=1e-10, rtol=0)


@forward_mode
def test_forward_mode_says_what_it_cannot_do():
    x, starts = draw(6, 2, 4, grad=False), torch.tensor([0, 2, 6])
    with pytest.raises(NotImplementedError, match="no forward-mode derivative with dropout, found dropout=0.4"):
        torch.func.jvp(lambda x: ht.attention(x, x, x, dropout=0.4, seed=1), (x,), (x,))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative of packed sequences"):
        torch.func.jvp(lambda x: ht.attention_varlen(x, x, x, starts, starts), (x,), (x,))
    with pytest.raises(ValueError, match="alibi_slopes has a tangent, and no derivative"):
        torch.func.jvp(lambda slopes: ht.attention(x, x, x, alibi_slopes=slopes), (torch.ones(1),), (torch.ones(1),))


@forward_mode
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_forbidden_keys_hold_shows_in_no_derivative(softcap):
    query, key, value = draw(1, 4, 3, 2, grad=False), draw(1, 2, 5, 2, grad=False), draw(1, 2, 5, 3, grad=False)

    def derivatives(*inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        results = ht.attention(*inputs, valid_lens=[[3, 0, 2]], softcap=softcap, return_weights=True, return_lse=True)
        first = torch.autograd.grad([x[..., ::2, :].square().sum() for x in results[:2]], inputs, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
        _, forward = torch.func.jvp(
            lambda x: ht.attention(x, *inputs[1:], valid_lens=[[3, 0, 2]], softcap=softcap), (inputs[0],), (query,)
        )
        return *first, *second, forward

    expected = derivatives(query, key, value)
    for x, bad in ((key, math.nan), (value, math.inf)):
        x[:, :, 3:] = bad
    query[:, :, 1] = math.nan
    for found, clean in zip(derivatives(query, key, value), expected):
        assert torch.equal(found, clean)


def test_a_nan_that_is_attended_to_shows_in_its_row_s_derivatives():
    query, key = draw(1, 1, 3, 2), draw(1, 1, 3, 2, grad=False)
    key[:, :, 2] = math.nan
    out, weights = ht.attention(query, key, key, causal=True, return_weights=True)
    (through_weights,) = torch.autograd.grad(weights.square().sum(), query, retain_graph=True)
    assert through_weights.isnan().any(dim=-1).tolist() == [[[False, False, True]]]
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), query)
    assert second[0, 0, 2].isnan().all()


@pytest.mark.parametrize("which", range(1, 8))
def test_only_what_requires_a_gradient_gets_one(which):
    inputs = [draw(2, 3, 4, 8, grad=bool(which >> part & 1)) for part in range(3)]
    ht.attention(*inputs, causal=True).sum().backward()
    assert [x.grad is not None for x in inputs] == [x.requires_grad for x in inputs]


def test_little_is_saved_and_changes_in_place_are_seen():
    x = draw(1, 2, 64, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        out = ht.attention(x, x, x)
    assert len(saved) == 5 and max(math.prod(shape) for shape in saved) == x.numel()  # query, key, value, out, lse
    y = x * 1
    out = ht.attention(y, y, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_of_strided_expanded_and_chosen_parts():
    x = draw(2, 6, 5, 3, 4)
    query, key, value = x.permute(3, 0, 2, 1, 4)  # packed: three views of one tensor
    out = ht.attention(query[:, :, ::2], key, value.expand(2, 5, 6, 4))
    expected = F.scaled_dot_product_attention(query[:, :, ::2], key, value)
    torch.testing.assert_close(out, expected)
    for one, other in zip(*(torch.autograd.grad(r.square().sum(), x) for r in (out, expected))):
        torch.testing.assert_close(one, other)
    one = draw(6, 4)
    ht.attention(one.expand(2, 3, 6, 4), one.expand(2, 3, 6, 4), one.expand(2, 3, 6, 4)).sum().backward()
    assert one.grad.shape == (6, 4)


def test_tensors_that_are_stored_negated():
    def negated(x):
        view = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert view.is_neg() and torch.equal(view, x)
        return view

    x, bias, grad = draw(2, 3, 4, 8), draw(4, 4, grad=False), draw(2, 3, 4, 8, grad=False)
    for call in (lambda x: ht.attention(x, x, x), lambda x: ht.scaled_dot_product_attention(x, x, x)):
        assert torch.equal(call(negated(x.detach())), call(x.detach()))
    one = ht.attention(negated(x), x, negated(x), bias=negated(bias))
    other = ht.attention(x, x, x, bias=bias)
    assert torch.equal(one, other)
    grads = (torch.autograd.grad(out, x, given)[0] for out, given in ((one, negated(grad)), (other, grad)))
    torch.testing.assert_close(*grads)


def test_checkpointing_drops_the_same_weights_again():
    from torch.utils.checkpoint import checkpoint

    def dropped(x):
        return ht.attention(x, x, x, dropout=0.5)

    grads = []
    for call in (dropped, lambda x: checkpoint(dropped, x, use_reentrant=False)):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 256).reshape(1, 2, 16, 8).requires_grad_()
        call(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


# ---- Modes ----


def test_no_grad_inference_and_out():
    x = draw(1, 2, 5, 8)
    with torch.no_grad():
        assert not ht.attention(x, x, x).requires_grad
        out = torch.empty(1, 2, 5, 8, dtype=torch.float64)
        assert ht.attention(x, x, x, out=out) is not None and torch.equal(out, ht.attention(x, x, x))
    with torch.inference_mode():
        y = torch.randn(1, 2, 5, 8)
        assert torch.equal(ht.attention(y, y, y), ht.scaled_dot_product_attention(y, y, y))
        assert ht.MultiheadAttention(8, 2)(y[0], y[0], y[0])[0].shape == (2, 5, 8)
    with pytest.raises(ValueError, match="out= records no gradients"):
        ht.attention(x, x, x, out=out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_torch_s_attention_does(dtype):
    x, mask = torch.randn(2, 2, 6, 8, requires_grad=True), torch.randn(6, 6)
    with torch.autocast("cpu", dtype):
        ours, theirs = (
            f(x, x, x, attn_mask=mask) for f in (ht.scaled_dot_product_attention, F.scaled_dot_product_attention)
        )
        assert ours.dtype == theirs.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=0)
        double = x.double()
        assert ht.attention(double, double, double).dtype == torch.float64
        layer = ht.MultiheadAttention(8, 2, add_bias_kv=True)
        assert layer(x[0], x[0], x[0])[0].dtype == dtype
    ours.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_seeds_come_from_torch_s_generator():
    x = torch.randn(1, 2, 8, 4)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(ht.attention(x, x, x, dropout=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    given = ht.attention(x, x, x, dropout=0.5, seed=2**64 - 1)
    assert torch.equal(given, headway.attention(x, x, x, dropout=0.5, seed=2**64 - 1))


# ---- Operators ----


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["plain", "strided", "options", "packed", "half"])
def test_opcheck(one_thread, kind):  # noqa: F811
    inputs = [draw(2, 4, 5, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 4)]
    options, weights = Options(), False
    if kind == "strided":
        inputs = [draw(2, 5, 4, 8).transpose(1, 2).detach().requires_grad_() for _ in range(3)]
    elif kind == "options":
        lens = torch.tensor([3, 6])
        options = Options(
            bias=draw(4, 1, 6), sinks=draw(4), mask=torch.rand(5, 6) < 0.9, valid_lens=lens, causal="bottom_right",
            window_left=3, scale=0.3, softcap=4.0,
        )  # fmt: skip
        weights = True
    elif kind == "packed":
        starts = torch.tensor([0, 3, 7])
        inputs = [draw(7, 4, 8), draw(7, 2, 8), draw(7, 2, 8)]
        options = Options(cu_seqlens_q=starts, cu_seqlens_k=starts)
    elif kind == "half":
        inputs = [x.detach().bfloat16() for x in inputs]
    torch.library.opcheck(_ops.attention, (*inputs, *options, weights))
    out, lse, _ = (x.detach() for x in _ops.attention(*inputs, *options, weights))
    grad_lse = None
    if kind == "options":
        grad_lse = torch.randn_like(lse)
    else:  # second derivatives are traced once, above
        inputs = [x.detach() for x in inputs]
    torch.library.opcheck(_ops.attention_backward, (torch.randn_like(out), grad_lse, *inputs, out, lse, *options))


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_in_one_graph():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = ht.MultiheadAttention(16, 4, dropout=0.5, batch_first=True, dtype=torch.float64)
            self.tutorial = ht.MultiHeadAttention(16, 4).double()

        def forward(self, x, mask):
            x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
            x = x + self.tutorial(x, x, x)
            return x + ht.scaled_dot_product_attention(x, x, x, is_causal=True) + ht.attention(x, x, x, window=(2, 2))

    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(copy.deepcopy(model).eval(), fullgraph=True, backend="aot_eager")
    model.eval()
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for batch in (2, 3, 4):  # the second size makes shapes symbolic
        x = draw(batch, 7, 16)
        ours, theirs = compiled(x, mask), model(x, mask)
        torch.testing.assert_close(ours, theirs)
        for one, other in zip(*(torch.autograd.grad(r.square().sum(), x) for r in (ours, theirs))):
            torch.testing.assert_close(one, other)
    training = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    first = training(x, mask)
    torch.manual_seed(0)
    assert torch.equal(first, training(x, mask)) and not torch.equal(first, training(x, mask))
    first.sum().backward()


def test_torch_func():
    x = draw(3, 2, 4, 5, 8, grad=False)
    ours, theirs = ht.attention, lambda *x: torch.softmax(x[0] @ x[1].mT / math.sqrt(8), -1) @ x[2]
    torch.testing.assert_close(torch.vmap(ours)(x, x, x), theirs(x, x, x))
    torch.testing.assert_close(torch.vmap(ours, in_dims=(0, None, 1))(x, x[0], x.transpose(0, 1)), theirs(x, x[0], x))
    loss = lambda f: lambda q: f(q, q, q).square().sum()  # noqa: E731
    for transform in (
        lambda f: torch.func.grad(f)(x[0]),
        lambda f: torch.vmap(torch.func.grad(f))(x),
        lambda f: torch.func.grad(lambda q: torch.func.grad(f)(q).square().sum())(x[0]),
        lambda f: torch.func.jacrev(f)(x[0]),
    ):
        torch.testing.assert_close(transform(loss(ours)), transform(loss(theirs)))


# ---- What is refused ----

BLOCK_MASK = create_block_mask(lambda b, h, i, j: j <= i, None, None, 5, 5, device="cpu")
REFUSED = [
    (ValueError, "attention: key has head_dim 9, query has 8", {"key": torch.ones(2, 3, 5, 9)}),
    (TypeError, "attention: key has type f64, query has f32", {"key": torch.ones(2, 3, 5, 8).double()}),
    (ValueError, "attention: causal is ambiguous with 5 queries and 4 keys", {"causal": True, "short": True}),
    (ValueError, "attention: causal is 'left', expected False, True", {"causal": "left"}),
    (TypeError, "attention: causal is 1, expected False, True", {"causal": 1}),
    (ValueError, "attention: window left is -1, expected 0 or more, or None", {"window": (-1, 0)}),
    (TypeError, "attention: window is 3, expected a pair", {"window": 3}),
    (ValueError, r"attention: window is \(1, 2, 3\), expected a pair", {"window": (1, 2, 3)}),
    (ValueError, "attention: dropout is 1.5, expected 0 to 1", {"dropout": 1.5}),
    (ValueError, "attention: seed is -1, expected 0 to 2", {"seed": -1}),
    (TypeError, "attention: seed is 'x', expected an integer", {"seed": "x"}),
    (TypeError, "attention: mask has type i64, expected bool", {"mask": torch.ones(5, 5).long()}),
    (ValueError, r"attention: valid_lens\[1\] is 9, expected 0 to 5", {"valid_lens": [1, 9]}),
    (ValueError, "attention: alibi_slopes requires grad", {"alibi_slopes": torch.ones(3, requires_grad=True)}),
    (TypeError, "unexpected keyword argument 'is_causal'; did you mean 'causal'", {"is_causal": True}),
    (TypeError, "unexpected keyword argument 'attn_mask'; did you mean 'mask'", {"attn_mask": None}),
    (TypeError, "attention: key is a list, expected a torch.Tensor", {"key": [[1.0]]}),
    (TypeError, "mask is a BlockMask, .*; headway.masks.from_block_mask makes", {"mask": BLOCK_MASK}),
    (TypeError, "attention: bias is a ndarray, expected a torch.Tensor", {"bias": np.zeros((5, 5))}),
    (TypeError, "attention: dropout is 'a', expected a number", {"dropout": "a"}),
    (TypeError, "cannot be read through DLPack", {"query": torch.ones(2, 3, 5, 8).to_sparse()}),
]


@pytest.mark.parametrize("error, text, options", REFUSED)
def test_what_cannot_be_is_named(error, text, options):
    arguments = {name: torch.ones(2, 3, 5, 8) for name in ("query", "key", "value")} | options
    if arguments.pop("short", False):
        arguments["key"] = arguments["value"] = torch.ones(2, 3, 4, 8)
    with pytest.raises(error, match=text):
        ht.attention(**arguments)


def test_devices_that_the_build_has_no_engine_for():
    fake = ht.attention(*3 * [torch.ones(1, 2, 3, 4, device="meta")])
    assert fake.shape == (1, 2, 3, 4) and fake.device.type == "meta"
    if torch.cuda.is_available() and "cuda" not in headway.engines():
        with pytest.raises(NotImplementedError, match="attention: "):
            ht.attention(*3 * [torch.ones(1, 2, 3, 4, device="cuda")])


def test_shapes_and_strides_on_a_gpu_are_known_without_one():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(2, 9, 3, 8, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        out, lse = ht.attention(x, x, x, causal=True, return_lse=True)
        y = torch.empty(2, 3, 9, 8, device="cuda", dtype=torch.bfloat16)
        grads = _ops.attention_backward(out, None, x, x, y, out, lse, *Options())
    for one, like in zip((out, *grads), (x, x, x, y)):
        assert one.device.type == "cuda" and one.dtype == x.dtype and one.stride() == like.stride()
    assert lse.device.type == "cuda" and lse.dtype == torch.float32


# ---- What torch's FlopCounterMode counts ----


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    counts = counter.get_flop_counts()["Global"]
    assert all("headway" in str(operator) for operator in counts)
    return {str(operator).split(".")[-1]: count for operator, count in counts.items()}


@pytest.mark.parametrize("options", [{}, {"causal": "top_left", "window": (3, 0), "return_weights": True}])
def test_flops_are_counted_as_those_of_torchs_fused_attention(options):
    query, key, value = draw(2, 6, 5, 8), draw(2, 3, 7, 8), draw(2, 3, 7, 4)

    def call():
        out = ht.attention(query, key, value, **options)
        (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()

    sizes = query.shape, (2, 6, 7, 8), (2, 6, 7, 4)  # older versions of torch count equal numbers of heads alone
    assert counted(call) == {
        "attention": sdpa_flop_count(*sizes),
        "attention_backward": sdpa_backward_flop_count((2, 6, 5, 4), *sizes),
    }
    with torch.no_grad():
        one_head = query[0, 0], key[0, 0], value[0, 0]
        assert counted(lambda: ht.attention(*one_head)) == {"attention": sdpa_flop_count(*sizes) // (2 * 6)}


def test_flops_of_packed_sequences_are_those_of_each():
    query, key, value = draw(6, 2, 8), draw(9, 2, 8), draw(9, 2, 4)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 3, 9], dtype=torch.int32)
    found = counted(lambda: ht.attention_varlen(query, key, value, *bounds).sum().backward())
    pairs = 2 * (2 * 3 + 4 * 6)
    assert found == {"attention": 2 * pairs * (8 + 4), "attention_backward": 2 * pairs * (3 * 8 + 2 * 4)}
    with FakeTensorMode() as mode:  # whose numbers nobody knows: at most all pairs
        fake = [mode.from_tensor(x) for x in (query, key, value, *bounds)]
        assert counted(lambda: ht.attention_varlen(*fake)) == {"attention": 2 * (2 * 6 * 9) * (8 + 4)}
