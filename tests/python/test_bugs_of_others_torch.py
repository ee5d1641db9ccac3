"""What went wrong in PyTorch's own attention, by number of the report, and does not in headway.torch."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import headway.torch as ht  # noqa: E402
import oracle  # noqa: E402
from torch_support import one_thread  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("one_thread")
nn = torch.nn


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def two_modules(width, heads, **options):
    """torch's module, and ours with its parameters."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64, **options)
    ours = ht.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


# ---- Modules ----


def test_the_module_gives_the_same_in_training_evaluation_and_without_gradients():
    """pytorch#86120, pytorch#106630: a fast path in evaluation handled padding another way."""
    _, module = two_modules(12, 3, dropout=0.5)
    x = draw(2, 6, 12)
    padding = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    module.dropout = 0.0
    training = module.train()(x, x, x, key_padding_mask=padding)[0]
    module.dropout = 0.5
    evaluating = module.eval()(x, x, x, key_padding_mask=padding)[0]
    with torch.no_grad():
        without_gradients = module(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    assert torch.equal(training, evaluating)
    torch.testing.assert_close(without_gradients, evaluating, rtol=1e-13, atol=1e-13)


def test_dropout_is_dead_in_evaluation():
    """pytorch#124464: dropout acted in eval()."""
    _, module = two_modules(8, 2, dropout=0.9)
    x = draw(1, 5, 8)
    first, second = (module.eval()(x, x, x)[0] for _ in range(2))
    assert torch.equal(first, second) and not torch.equal(module.train()(x, x, x)[0], first)


@pytest.mark.parametrize("both", [False, True])
def test_a_mask_for_each_head_and_item_works_in_evaluation_too(both):
    """pytorch#97409, pytorch#97605: masks (N * heads, L, S) crashed on the fast path, or with padding beside them."""
    theirs, ours = two_modules(12, 3)
    x = draw(2, 5, 12)
    mask = torch.rand(6, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.7
    mask[..., 0] = False
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]]) if both else None
    expected = theirs.train()(x, x, x, attn_mask=mask, key_padding_mask=padding)[0]
    with torch.no_grad():
        found = ours.eval()(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weights", [False, True])
def test_a_head_or_an_item_that_is_masked_whole_gives_no_nan(weights):
    """pytorch#160064, pytorch#152028, pytorch#27968: NaN, on some paths only, and in the gradients of all."""
    theirs, ours = two_modules(3, 3)
    x = draw(1, 5, 3).requires_grad_()
    mask = torch.tensor([False, False, True]).view(-1, 1, 1).expand(-1, 5, 5)
    out, found = ours(x, x, x, attn_mask=mask, need_weights=weights, average_attn_weights=False)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert not weights or not found[0, 2].any()
    # The two heads that see something, as torch gives them where nothing is masked.
    theirs.out_proj.weight.data[:, 2] = 0
    expected = theirs(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_weights_asked_for_or_not_give_the_same_output():
    """pytorch#100347: need_weights=True, the default, silently chose another path."""
    _, module = two_modules(8, 2)
    x = draw(2, 7, 8)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    outs = [module(x, x, x, attn_mask=mask, need_weights=wanted)[0] for wanted in (False, True)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_mask_beside_halves_is_read_as_float32(dtype):
    """pytorch#191612: the bits of a float32 mask were read as halves, and 97 % of the output was NaN."""
    mask = nn.Transformer.generate_square_subsequent_mask(32)
    _, module = two_modules(64, 4)
    x = draw(2, 32, 64)
    expected = module(x, x, x, attn_mask=mask.double(), need_weights=False)[0]
    halves = copy.deepcopy(module).to(dtype).eval()
    found = halves(x.to(dtype), x.to(dtype), x.to(dtype), attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.05)


def test_the_two_masks_of_the_module_mean_ignore_and_the_function_s_means_attend():
    """pytorch#170400: True has opposite meanings; each drop-in keeps its original's."""
    x = draw(1, 1, 5, 4)
    mask = torch.eye(5, dtype=torch.bool)
    assert torch.equal(ht.scaled_dot_product_attention(x, x, x, attn_mask=mask), x)
    _, module = two_modules(4, 1)
    _, weights = module(x[0], x[0], x[0], attn_mask=~mask)
    assert torch.equal(weights[0], torch.eye(5, dtype=torch.float64))


# ---- The function ----


def test_a_mask_that_a_bfloat16_gradient_passes_through_leaves_it_finite():
    """jax#32242 and pytorch#41508: a float32 bias over bfloat16 inputs gave NaN gradients."""
    x = draw(2, 4, 33, 32, dtype=torch.bfloat16).requires_grad_()
    bias = draw(1, 4, 33, 33, seed=1, dtype=torch.float32).requires_grad_()
    ht.attention(x, x, x, bias=bias).sum().backward()
    y, wide = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    ht.attention(y, y, y, bias=wide).sum().backward()
    torch.testing.assert_close(bias.grad.double(), wide.grad, rtol=0.05, atol=0.05)
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=0.05, atol=0.1)


def test_a_last_axis_that_is_no_step_of_1_is_read_by_its_stride():
    """pytorch#187506, pytorch#116333, pytorch#109607: refused, or read as if the elements followed each other."""
    views = [draw(2, 3, 8, 5, seed=n).transpose(2, 3) for n in range(3)]
    found = ht.scaled_dot_product_attention(*views)
    expected = oracle.attention(*(x.numpy() for x in views)).out
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-14)
    one = draw(1, 1, 1, 8, seed=4).as_strided((1, 1, 1, 8), (1, 3, 1, 1))  # what a copy of one row may be
    torch.testing.assert_close(ht.scaled_dot_product_attention(one, one, one), one)


def test_no_strange_size_crashes():
    """pytorch#141218, pytorch#141229: a floating-point exception for shapes that do not fit each other."""
    with pytest.raises((ValueError, TypeError)):
        ht.scaled_dot_product_attention(
            torch.zeros(0, 1, 7, 2, 8, 9, 0, 0, 3).half(),
            torch.zeros(0, 0, 7).half(),
            torch.zeros(0, 0, 7, 0, 9, 9, 2, 8).half(),
            enable_gqa=True,
        )
    empty = torch.zeros(0, 0, 2, 0, dtype=torch.bfloat16)
    assert ht.scaled_dot_product_attention(empty, empty, empty).shape == (0, 0, 2, 0)


def test_a_mask_and_is_causal_hold_together():
    """dia#170: torch refuses the two, and users drop one of them."""
    x = draw(1, 2, 6, 4)
    mask = torch.tensor([1, 1, 0, 1, 1, 1]).bool()
    found = ht.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        x, x, x, attn_mask=mask & torch.ones(6, 6).tril().bool()
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# ---- Derivatives ----


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_there_are_forward_and_second_derivatives():
    """pytorch#154226, pytorch#165530, pytorch#116350, flash-attention#1672: no jvp, no double backward."""
    x = draw(1, 2, 4, 3)
    function = lambda y: ht.scaled_dot_product_attention(y, y, y, is_causal=True)  # noqa: E731
    plain = lambda y: (  # noqa: E731
        (y @ y.mT / 3**0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1) @ y
    )
    for one, other in zip(torch.func.jvp(function, (x,), (x,)), torch.func.jvp(plain, (x,), (x,))):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    found, expected = (torch.func.hessian(lambda y, f=f: f(y).sin().sum())(x) for f in (function, plain))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_a_bias_that_is_shared_gets_the_sum_of_its_gradients():
    """pytorch#145208, attention-gym#20: learned biases had no gradient, or a wrong one where they are broadcast."""
    x = draw(3, 2, 5, 4)
    table = draw(9, seed=1).requires_grad_()
    i, j = torch.meshgrid(torch.arange(5), torch.arange(5), indexing="ij")
    ht.attention(x, x, x, bias=table[i - j + 4]).square().sum().backward()
    found, table.grad = table.grad, None
    ((x @ x.mT / 2 + table[i - j + 4]).softmax(-1) @ x).square().sum().backward()
    torch.testing.assert_close(found, table.grad, rtol=1e-11, atol=1e-11)


def test_an_lse_in_the_loss_has_its_gradient():
    """pytorch#136232: NaN in backward where lse is returned and used."""
    x = draw(1, 2, 7, 4).requires_grad_()
    out, lse = ht.attention(x, x, x, causal=True, return_lse=True)
    (found,) = torch.autograd.grad((out * lse.exp().unsqueeze(-1)).sum(), x)
    scores = (x @ x.mT / 2).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    (expected,) = torch.autograd.grad((scores.exp() @ x).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
