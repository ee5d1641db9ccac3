"""torch.func's transforms, one inside the other, give what they give of torch's own attention."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

import headway.torch as ht  # noqa: E402
from torch_support import one_thread  # noqa: E402, F401

# torch compiles a part of its own jvp with what it deprecates.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
torch_attention = torch.nn.functional.scaled_dot_product_attention

# A function from 3 numbers to 3 numbers, transformed into another such function or into one with more results.
DIRECTION = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)


def loss(function):
    return lambda t: function(t).sin().sum()


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(loss(f)),
    "vjp": lambda f: lambda t: torch.func.vjp(lambda u: f(u).sin(), t)[1](torch.ones_like(f(t)))[0],
    "jvp": lambda f: lambda t: torch.func.jvp(f, (t,), (DIRECTION.to(t.dtype),))[1],
    "vmap": lambda f: lambda t: torch.vmap(f)(torch.stack([t, t * t])),
    "jacrev": lambda f: torch.func.jacrev(f),
    "jacfwd": lambda f: torch.func.jacfwd(f),
    "hessian": lambda f: torch.func.hessian(loss(f)),
}


def draw(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


MASK = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 1], [1, 1, 0, 1]]).bool()
CASES = {  # options, the heads of key and value, and whether a float mask depends on the numbers too
    "plain": ({}, 2, False),
    "causal": ({"is_causal": True}, 2, False),
    "mask": ({"attn_mask": MASK}, 2, False),
    "float mask": ({"scale": 0.7}, 2, True),
    "gqa": ({"enable_gqa": True}, 1, False),
    "gqa with a float mask": ({"enable_gqa": True}, 1, True),
}


def of_three_numbers(attention, case):
    """Attention whose query, key, value and float mask all depend on 3 numbers, seen through 3 numbers."""
    options, kv_heads, float_mask = CASES[case]
    shapes = [(1, 2, 3, 2), (1, kv_heads, 4, 2), (1, kv_heads, 4, 3), (2, 3, 4)][: 4 if float_mask else 3]
    bases = [draw(*shape, seed=n) for n, shape in enumerate(shapes)]
    slopes = [draw(*shape, 3, seed=9 + n) for n, shape in enumerate(shapes)]
    seen = draw(3, 18, seed=20)

    def function(t):
        query, key, value, *mask = (base + slope @ t for base, slope in zip(bases, slopes))
        return seen @ attention(query, key, value, **({"attn_mask": mask[0]} if mask else {}), **options).flatten()

    return function


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_two_transforms_give_what_they_give_of_torch_s_own_function(outer, inner, case):
    both = lambda f: TRANSFORMS[outer](TRANSFORMS[inner](f))  # noqa: E731
    t = draw(3, seed=30)
    expected = both(of_three_numbers(torch_attention, case))(t)
    found = both(of_three_numbers(ht.scaled_dot_product_attention, case))(t)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)  # fourth derivatives among them


# ---- What torch's function has no argument for ----

OPTIONS = {
    "softcap, ALiBi, sinks": {"softcap": 1.5, "alibi_slopes": [0.1, 0.4], "sinks": True},
    "window": {"causal": "bottom_right", "window": (2, 0), "sinks": True},
    "rows without keys": {"valid_lens": [[0, 4, 3]], "query_lens": [2], "bias": True, "alibi_slopes": [0.1, 0.4]},
    "a bias that forbids a row": {"bias": "-inf"},
    "sinks alone in a row": {"valid_lens": [[0, 4, 3]], "query_lens": [2], "sinks": True},
}


def of_all_results(case):
    """Out, weights and lse of a call whose inputs all depend on 3 numbers, as one vector."""
    given = dict(OPTIONS[case])
    shapes = {"query": (1, 2, 3, 2), "key": (1, 1, 4, 2), "value": (1, 1, 4, 3), "bias": (2, 1, 4), "sinks": (2,)}
    kind = given.pop("bias", False)
    inputs = {"query", "key", "value"} | ({"bias"} if kind else set()) | ({"sinks"} & {*given})
    given.pop("sinks", None)
    bases = {name: draw(*shapes[name], seed=n) for n, name in enumerate(shapes)}
    slopes = {name: draw(*shapes[name], 3, seed=9 + n) for n, name in enumerate(shapes)}
    forbidden = torch.zeros(2, 3, 4).double()
    forbidden[:, 1] = -torch.inf if kind == "-inf" else 0.0

    def function(t):
        depending = {name: bases[name] + slopes[name] @ t for name in inputs}
        if kind:
            depending["bias"] = depending["bias"] + forbidden
        out, weights, lse = ht.attention(**depending, **given, return_weights=True, return_lse=True)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        return torch.cat([out.flatten(), weights.flatten(), lse.flatten()]).sin()

    return function


@pytest.mark.parametrize("case", OPTIONS)
def test_second_derivatives_agree_in_every_order_of_modes_and_with_differences(case):
    function, t = of_all_results(case), draw(3, seed=30)
    jacrev, jacfwd = torch.func.jacrev, torch.func.jacfwd
    step = 1e-5 * torch.eye(3, dtype=torch.float64)
    differences = torch.stack([(jacrev(function)(t + h) - jacrev(function)(t - h)) / 2e-5 for h in step], dim=-1)
    torch.testing.assert_close(jacrev(function)(t), jacfwd(function)(t), rtol=1e-11, atol=1e-11)
    for outer in (jacrev, jacfwd):
        for inner in (jacrev, jacfwd):
            found = outer(inner(function))(t)
            torch.testing.assert_close(found, differences, rtol=1e-7, atol=1e-7)


def test_a_vjp_is_differentiated_after_its_function_was_left():
    function, t = of_three_numbers(ht.scaled_dot_product_attention, "float mask"), draw(3, seed=30)
    expected = torch.func.jacrev(of_three_numbers(torch_attention, "float mask"))(t)
    _, vjp = torch.func.vjp(function, t)
    weights, direction = draw(3, seed=40), draw(3, seed=41)
    (_, tangent) = torch.func.jvp(lambda w: vjp(w)[0], (weights,), (direction,))
    torch.testing.assert_close(tangent, direction @ expected)
    torch.testing.assert_close(torch.func.grad(lambda w: vjp(w)[0].sum())(weights), expected.sum(dim=1))


def test_autograd_goes_on_outside_of_a_transform():
    both = []
    for attention in (ht.scaled_dot_product_attention, torch_attention):
        function = of_three_numbers(attention, "gqa with a float mask")
        t = draw(3, seed=30).requires_grad_()
        found = torch.func.grad(loss(function))(t) + torch.func.jvp(function, (t,), (DIRECTION,))[1]
        (second,) = torch.autograd.grad(found.square().sum(), t)
        both.append((second, torch.autograd.functional.hessian(loss(function), t)))
    torch.testing.assert_close(*both, rtol=1e-11, atol=1e-11)


def batched_gradients(output, inputs, grads):
    return torch.autograd.grad(output, inputs, grads, is_grads_batched=True, retain_graph=True)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(3, 3, dtype=torch.float64)}])
def test_a_batch_of_gradients_is_one_backward_for_each(options):
    """What autograd.grad(is_grads_batched=True) and autograd.functional.jacobian(vectorize=True) run."""
    query, key, value = (draw(2, 2, 3, 4, seed=n).requires_grad_() for n in range(3))
    out = ht.scaled_dot_product_attention(query, key, value, **options)
    grads = draw(5, *out.shape, seed=3)
    found = batched_gradients(out, (query, key, value), grads)
    one_by_one = [torch.autograd.grad(out, (query, key, value), grad, retain_graph=True) for grad in grads]
    for gradient, parts in zip(found, zip(*one_by_one)):
        assert torch.equal(gradient, torch.stack(parts))


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_batch_of_gradients_of_a_layer_is_torch_s(need_weights):
    ours = ht.MultiheadAttention(8, 2, batch_first=True).double()
    original = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    original.load_state_dict(ours.state_dict())
    x, grads = draw(2, 3, 8, seed=0).requires_grad_(), draw(5, 2, 3, 8, seed=1)
    results = []
    for layer in (ours, original):
        out, _ = layer(x, x, x, need_weights=need_weights)
        results.append(batched_gradients(out, (x, layer.in_proj_weight), grads))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_each_item_of_a_vmap_has_a_mask_and_lengths_of_its_own():
    x = draw(3, 2, 4, 5, seed=1)
    masks = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(2)) < 0.6
    lengths = torch.tensor([4, 2, 3])

    def second(x, mask, length):
        call = lambda y: ht.attention(y, y, y, mask=mask, valid_lens=length.expand(1, 4)).sin().sum()  # noqa: E731
        return torch.func.hessian(lambda y: call(y[None]))(x)

    together = torch.vmap(second)(x, masks, lengths)
    alone = torch.stack([second(*item) for item in zip(x, masks, lengths)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def gradient_along(f):
    """jvp over grad."""
    return lambda x: torch.func.jvp(torch.func.grad(f), (x,), (x,))


@pytest.mark.parametrize(
    "transform", [torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f)), gradient_along]
)
def test_what_has_no_second_derivative_says_so(transform):
    x, starts = draw(1, 2, 3, 4, seed=1), torch.tensor([0, 1, 3])
    with pytest.raises(NotImplementedError, match="derivative with dropout, found dropout=0.5"):
        transform(lambda x: ht.attention(x, x, x, dropout=0.5, seed=1).sum())(x)
    with pytest.raises(NotImplementedError, match="attention_varlen: there is no .* derivative of packed sequences"):
        transform(lambda x: ht.attention_varlen(x, x, x, starts, starts).sum())(x[0].transpose(0, 1))


def test_forward_mode_beside_a_call_changes_none_of_its_gradients():
    x, starts = draw(1, 2, 3, 4, seed=1), torch.tensor([0, 1, 2])
    calls = [
        lambda x: ht.attention(x, x, x),
        lambda x: ht.attention(x, x, x, dropout=0.5, seed=1),
        lambda x: ht.attention_varlen(x[0], x[0], x[0], starts, starts),
    ]
    for call in calls:
        gradient = torch.func.grad(lambda x, call=call: call(x).sin().sum())
        expected = gradient(x)
        with forward_ad.dual_level():
            torch.testing.assert_close(gradient(x), expected, rtol=1e-12, atol=1e-12)
        with forward_ad.dual_level():
            y = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(call(y).sin().sum(), y)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


MEASURING = """
import re
import torch
import headway.torch as ht

def peak():  # in bytes; of this program alone, where getrusage begins with what its parent had
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

def second_derivative(x):
    (first,) = torch.autograd.grad(ht.attention(x, x, x).sin().sum(), x, create_graph=True)
    first.sin().sum().backward()

second_derivative(torch.ones(1, 4, 8, 16, requires_grad=True))
before = peak()
second_derivative(torch.ones(1, 4, 2048, 16, requires_grad=True))
print((peak() - before) / (4 * 2048**2 * 4))
"""


def test_a_second_derivative_stores_about_ten_matrices_for_each_head():
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURING], stdout=subprocess.PIPE, check=True)
    assert 3 < float(ended.stdout) < 11


# ---- vmap of nothing, rope ----


def test_a_vmap_of_no_items_has_the_shapes_of_some():
    x, none = draw(1, 2, 3, 4, seed=0), torch.zeros(0, 1, 2, 3, 4).double()

    def results(query, lengths=None):
        return ht.attention(query, x, x, valid_lens=lengths, return_weights=True, return_lse=True)

    lengths = torch.zeros(0, 1, dtype=torch.int64)
    for found in (torch.vmap(results)(none), torch.vmap(results, (None, 0))(x, lengths)):
        assert [tuple(part.shape) for part in found] == [(0, 1, 2, 3, 4), (0, 1, 2, 3, 3), (0, 1, 2, 3)]
    gradient = torch.vmap(torch.func.grad(lambda query: results(query)[0].sum()))
    assert gradient(none).shape == none.shape


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
ROTATIONS = [{}, {"base": 500.0, "dims": 4, "interleaved": True}, {"scaling": YARN}]


@pytest.mark.parametrize("options", ROTATIONS)
def test_rope_goes_through_every_transform(options):
    """Rotations are linear: tangents are rotated as the numbers are, gradients back."""
    positions, x, direction = torch.tensor([0, 7, 3]), draw(2, 3, 6, seed=0), draw(2, 3, 6, seed=1)
    plain = lambda x: ht.rope(x, positions, **options)  # noqa: E731
    expected = plain(x)
    found, tangent = torch.func.jvp(plain, (x,), (direction,))
    assert torch.equal(found, expected) and torch.equal(tangent, plain(direction))
    assert torch.equal(torch.vmap(plain)(torch.stack([x, direction])), torch.stack([expected, plain(direction)]))
    by_item = torch.stack([positions, positions + 5])
    each = torch.vmap(lambda x, p: ht.rope(x, p, **options))(torch.stack([x, x]), by_item)
    assert torch.equal(each[1], ht.rope(x, positions + 5, **options))
    recorded = x.clone().requires_grad_()
    plain(recorded).pow(3).sum().backward()
    assert torch.equal(torch.func.grad(lambda x: plain(x).pow(3).sum())(x), recorded.grad)
    first = x[:1, :, :].clone()
    jacobian = torch.func.jacrev(plain)(first).reshape(18, 18)
    torch.testing.assert_close(jacobian, torch.func.jacfwd(plain)(first).reshape(18, 18))
    torch.testing.assert_close(jacobian @ first.flatten(), plain(first).flatten())
    hessian = torch.func.hessian(lambda x: plain(x).square().sum())(first).reshape(18, 18)
    factor = float(plain(first).square().sum() / first.square().sum()) if not options.get("dims") else 1.0
    torch.testing.assert_close(hessian, 2 * factor * torch.eye(18).double())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", ROTATIONS)
def test_rope_is_one_call_of_a_compiled_program(options):
    run = torch.compile(lambda x, p: 2 * ht.rope(x, p, **options), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (3, 5, 8):
        x, positions = draw(2, length, 6, seed=length), torch.arange(length)
        ours, compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
        (2 * ht.rope(ours, positions, **options)).square().sum().backward()
        run(compiled, positions).square().sum().backward()
        assert torch.equal(ours.grad, compiled.grad)


# ---- torch's default device ----


def test_lists_and_seeds_are_in_host_memory_whatever_the_default_device_is():
    x = draw(1, 2, 6, 8, seed=0).requires_grad_()
    rows, cache = x.detach()[0].transpose(0, 1), torch.zeros(1, 8, 2, 8).double()
    torch.manual_seed(0)
    expected = ht.attention(x, x, x, dropout=0.5, valid_lens=[4])
    torch.manual_seed(0)
    with torch.device("meta"):
        assert torch.equal(ht.attention(x, x, x, dropout=0.5, valid_lens=[4]), expected)
        ht.attention(x, x, x, dropout=0.5, seed=3, spans=[[[0, 2]]] * 6).sum().backward()
        ht.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum().backward()
        assert ht.attention_varlen(rows, rows, rows, [0, 4, 6], [0, 4, 6]).device.type == "cpu"
        assert ht.rope(x, range(6)).device.type == torch.vmap(lambda x: ht.rope(x, range(6)))(x).device.type == "cpu"
        query = x.detach().transpose(1, 2)
        found = ht.flash_attn_with_kvcache(query, cache, cache.clone(), query, query, cache_seqlens=1)
        assert found.device.type == "cpu" and cache[0, 1].any()
    with pytest.raises(ValueError, match=r"valid_lens\[0\] is 9, expected 0 to 6"), torch.device("meta"):
        ht.attention(x, x, x, valid_lens=[9])
