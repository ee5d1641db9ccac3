"""headway.torch.MultiheadAttention against torch.nn.MultiheadAttention, and the swap inside models."""

import copy
import itertools
import math
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import headway.torch  # noqa: E402
from headway.torch import MultiheadAttention, replace_attention, restore_attention  # noqa: E402
from torch_support import one_thread  # noqa: E402, F401

WIDTH, HEADS, BATCH = 12, 3, 2

AXES = {
    "inputs": ["self", "keys are values", "all differ", "kdim and vdim"],
    "layout": ["length first", "batch first", "no batch"],
    "bias": [True, False],
    "bias_kv": [False, True],
    "zero": [False, True],
    "attn_mask": ["none", "bool", "float", "bool per head", "float per head", "causal hint", "float, infinite"],
    "padding": ["none", "bool", "float", "float, infinite"],
    "weights": ["none", "mean", "per head"],
}


def combinations(count):
    """As many combinations, spread over the whole product; the same ones each time."""
    everything = list(itertools.product(*AXES.values()))
    return [dict(zip(AXES, values)) for values in random.Random(0).sample(everything, count)]


def make_case(case, seed):
    """The two modules with the same parameters, the inputs and the call's options, in float64."""
    torch.manual_seed(seed)
    queries, keys = 6, 6 if case["inputs"] == "self" or case["attn_mask"] == "causal hint" else 9
    options = {"bias": case["bias"], "add_bias_kv": case["bias_kv"], "add_zero_attn": case["zero"]}
    options |= {"kdim": 7, "vdim": 5} if case["inputs"] == "kdim and vdim" else {}
    options |= {"batch_first": case["layout"] == "batch first", "dtype": torch.float64}
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = MultiheadAttention(WIDTH, HEADS, **options)
    ours.load_state_dict(theirs.state_dict())

    def draw(length, width):
        shape = {
            "length first": (length, BATCH, width),
            "batch first": (BATCH, length, width),
            "no batch": (length, width),
        }
        return torch.randn(shape[case["layout"]], dtype=torch.float64, requires_grad=True)

    query = draw(queries, WIDTH)
    if case["inputs"] == "self":
        inputs = [query]
    elif case["inputs"] == "keys are values":
        inputs = [query, draw(keys, WIDTH)]
    else:
        inputs = [query, draw(keys, ours.kdim), draw(keys, ours.vdim)]
    return theirs, ours, inputs, call_options(case, queries, keys)


def call_options(case, queries, keys):
    batch = 1 if case["layout"] == "no batch" else BATCH
    kind, per_head = case["attn_mask"].split(",")[0].split()[0], "per head" in case["attn_mask"]
    shape = (batch * HEADS, queries, keys) if per_head else (queries, keys)
    mask = None
    if kind == "causal":
        mask = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    elif kind != "none":
        mask = make_mask(shape, kind, "infinite" in case["attn_mask"])
    shape = (keys,) if case["layout"] == "no batch" else (batch, keys)
    padding = None
    if case["padding"] != "none":
        padding = make_mask(shape, case["padding"].split(",")[0], "infinite" in case["padding"])
    return {
        "attn_mask": mask,
        "key_padding_mask": padding,
        "need_weights": case["weights"] != "none",
        "average_attn_weights": case["weights"] == "mean",
        "is_causal": kind == "causal",
    }


def make_mask(shape, kind, infinite):
    """True, or -inf, is ignored; the first key never is: torch gives NaN where all are."""
    ignored = torch.rand(shape) < 0.4
    ignored[..., 0] = False
    if kind == "bool":
        return ignored
    if infinite:
        return torch.zeros(shape, dtype=torch.float64).masked_fill(ignored, -math.inf)
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def run(module, inputs, options):
    """Out and weights, and the gradients of both for the inputs, the float masks and every parameter."""
    query, key, value = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}[len(inputs)]
    out, weights = module(inputs[query], inputs[key], inputs[value], **options)
    results = [out] if weights is None else [out, weights]
    torch.manual_seed(5)
    loss = sum((result * torch.randn(result.shape, dtype=result.dtype)).sum() for result in results)
    masks = [options["attn_mask"], options["key_padding_mask"]]
    wanted = [*inputs, *(x for x in masks if x is not None and x.requires_grad), *module.parameters()]
    return results, torch.autograd.grad(loss, wanted, materialize_grads=True)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
def test_a_grid_of_options_gives_torch_s_results_and_gradients(one_thread):  # noqa: F811
    ran = 0
    for seed, case in enumerate(combinations(340)):
        theirs, ours, inputs, options = make_case(case, seed)
        assert list(theirs.state_dict()) == list(ours.state_dict())
        expected, expected_grads = run(theirs, inputs, options)
        found, grads = run(ours, inputs, options)
        for one, other in zip((*found, *grads), (*expected, *expected_grads), strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype, case
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=lambda text, case=case: f"{case}: {text}")
        ran += 1
    print(f"{ran} combinations agree with torch.nn.MultiheadAttention; none is refused")
    assert ran == 340


@pytest.mark.filterwarnings("ignore")  # the samples' module warns about what is not installed
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_torch_s_own_samples(one_thread, dtype):  # noqa: F811
    pytest.importorskip("expecttest", reason="torch's samples need expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    op = next(op for op in op_db if op.name == "nn.functional.multi_head_attention_forward")
    ran = 0
    for sample in op.sample_inputs("cpu", dtype):
        key, value, width, heads, weight, bias, bias_k, bias_v, zero, dropout, out_weight, out_bias = sample.args
        options = dict(sample.kwargs)
        module = MultiheadAttention(width, heads, dropout, True, True, zero, dtype=dtype)
        if options.pop("use_separate_proj_weight"):
            del module.in_proj_weight
            module.in_proj_weight = None
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                setattr(module, name, nn.Parameter(options[name]))
        else:
            module.in_proj_weight = nn.Parameter(weight)
        module.in_proj_bias, module.out_proj.weight = nn.Parameter(bias), nn.Parameter(out_weight)
        module.out_proj.bias = nn.Parameter(out_bias)
        module.bias_k, module.bias_v = (nn.Parameter(x.view(1, 1, -1)) for x in (bias_k, bias_v))
        module.train(options["training"])
        # With weights asked for, as by default, dropout is torch's own: the same seed drops the same.
        torch.manual_seed(11)
        expected = F.multi_head_attention_forward(sample.input, *sample.args, **sample.kwargs)
        torch.manual_seed(11)
        found = module(sample.input, key, value, attn_mask=options["attn_mask"])
        for one, other in zip(found, expected, strict=True):
            size = max(1.0, other.abs().max().item())
            torch.testing.assert_close(one, other, rtol=0, atol=(1e-11 if dtype == torch.float64 else 1e-4) * size)
        ran += 1
    assert ran >= 90


@pytest.mark.parametrize("options", [{}, {"kdim": 7, "vdim": 5}, {"add_bias_kv": True}, {"bias": False}], ids=str)
def test_the_same_seed_gives_the_same_parameters(options):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    torch.manual_seed(3)
    ours = MultiheadAttention(WIDTH, HEADS, **options)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name])
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inference_as_torch_s_fast_path(dtype):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    ours = copy.deepcopy(theirs)
    ours = replace_attention(ours).to(dtype)
    x = torch.randn(3, 10, 16)
    padding = torch.arange(10) >= torch.tensor([[10], [7], [1]])
    with torch.inference_mode():
        for options in ({}, {"key_padding_mask": padding}, {"need_weights": False}):
            expected, found = theirs(x, x, x, **options), ours(*3 * [x.to(dtype)], **options)
            for one, other in zip(found, expected):
                assert (one is None) == (other is None)
                if one is not None:
                    atol = 1e-5 if dtype == torch.float32 else 3e-2
                    torch.testing.assert_close(one.float(), other, rtol=0, atol=atol)


def test_dropout():
    layer = MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
    x = torch.randn(2, 20, 16)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(layer(x, x, x, need_weights=False)[0])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    theirs = restore_attention(copy.deepcopy(layer))
    torch.manual_seed(4)
    found = layer(x, x, x, average_attn_weights=False)
    torch.manual_seed(4)
    expected = theirs(x, x, x, average_attn_weights=False)
    assert 0.4 < (found[1] == 0).float().mean() < 0.6  # the weights after dropout, and torch's own
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
    assert torch.equal(layer.eval()(x, x, x)[0], layer(x, x, x)[0])
    everything = MultiheadAttention(16, 4, dropout=1.0)
    assert (everything(x, x, x, need_weights=False)[0] == everything.out_proj.bias).all()


def test_a_query_without_a_key_gives_no_nan():
    layer = MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16, requires_grad=True)
    padding = torch.tensor([[False] * 5, [True] * 5])
    for weights in (True, False):
        out, found = layer(x, x, x, key_padding_mask=padding, need_weights=weights)
        assert torch.equal(out[1], layer.out_proj.bias.expand(5, 16))
        assert found is None or (found[1] == 0).all()
        out.sum().backward()
        assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_what_padding_holds_never_shows(training, weights):
    layer = MultiheadAttention(16, 4, dropout=0.3, batch_first=True).train(training)
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    torch.manual_seed(0)
    expected = layer(x, x, x, key_padding_mask=padding, need_weights=weights)
    memory = x.masked_fill(padding[..., None], float("nan"))
    torch.manual_seed(0)
    found = layer(x, memory, memory, key_padding_mask=padding, need_weights=weights)
    torch.testing.assert_close(found, expected)


def test_no_matrix_is_stored_without_weights():
    layer = MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4096, 8)
    # 4096 * 4096 float32 for each of 2 heads would be 134 MB.
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t)
    with hooks:
        out, weights = layer(x, x, x, need_weights=False)
    out.sum().backward()
    assert weights is None and max(saved) <= 3 * x.numel()


REFUSED = [
    (ValueError, "query has width 9, expected 16", (torch.ones(5, 2, 9),) * 3, {}),
    (ValueError, "expected .* all three alike", (torch.ones(5, 2, 16), torch.ones(5, 16), torch.ones(5, 16)), {}),
    (ValueError, "expected .* all three alike", (torch.ones(16),) * 3, {}),
    (ValueError, "key has batch 3, query has 2", (torch.ones(5, 2, 16), *(torch.ones(5, 3, 16),) * 2), {}),
    (ValueError, "value has shape", (torch.ones(5, 2, 16), torch.ones(4, 2, 16), torch.ones(5, 2, 16)), {}),
    (
        ValueError,
        r"attn_mask has shape \(4, 5\), expected \(5, 5\) or \(8, 5, 5\)",
        None,
        {"attn_mask": torch.ones(4, 5)},
    ),
    (TypeError, "attn_mask has type torch.int64, expected bool", None, {"attn_mask": torch.ones(5, 5).long()}),
    (
        ValueError,
        r"key_padding_mask has shape \(5,\), expected \(2, 5\)",
        None,
        {"key_padding_mask": torch.ones(5) > 0},
    ),
    (RuntimeError, "is_causal .* attn_mask is None", None, {"is_causal": True}),
    (TypeError, "key is a NoneType, expected a torch.Tensor", (torch.ones(5, 2, 16), None, None), {}),
    (TypeError, "attn_mask is a list, expected a torch.Tensor", None, {"attn_mask": [[True]]}),
    (
        TypeError,
        "query has type torch.float64, the parameters have torch.float32",
        (torch.ones(5, 2, 16).double(),) * 3,
        {},
    ),
    (TypeError, "unexpected keyword argument 'mask'; did you mean 'attn_mask'", None, {"mask": None}),
]


@pytest.mark.parametrize("error, text, inputs, options", REFUSED)
def test_what_cannot_be_is_named(error, text, inputs, options):
    with pytest.raises(error, match=text):
        MultiheadAttention(16, 4)(*(inputs or (torch.ones(5, 2, 16),) * 3), **options)


def test_constructors_refuse():
    with pytest.raises(ValueError, match="embed_dim is 10, expected a multiple of the 4 heads"):
        MultiheadAttention(10, 4)
    with pytest.raises(ValueError, match="dropout is 1.5, expected 0 to 1"):
        MultiheadAttention(8, 4, dropout=1.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchfirst'; did you mean 'batch_first'"):
        MultiheadAttention(8, 4, batchfirst=True)
    with pytest.raises(ValueError, match="d_model is 10, expected a multiple of the 4 heads"):
        headway.torch.MultiHeadAttention(10, 4)
    with pytest.raises(
        TypeError, match="keyword argument 'batch_first'; .* headway.torch.MultiheadAttention, with a small h"
    ):
        headway.torch.MultiHeadAttention(8, 4, batch_first=True)


# ---- Inside models ----


def make_encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_an_encoder_goes_through_headway_and_back(one_thread, options, monkeypatch):  # noqa: F811
    model, x = make_encoder(**options), torch.randn(3, 10, 16)
    padding = torch.arange(10) >= torch.tensor([[10], [7], [1]])
    causal = nn.Transformer.generate_square_subsequent_mask(10)
    calls = [{}, {"src_key_padding_mask": padding}, {"mask": causal}, {"mask": causal, "is_causal": True}]
    calls.append({"mask": causal, "src_key_padding_mask": padding.float().masked_fill(padding, -math.inf)})
    count = []
    forward = MultiheadAttention.forward
    monkeypatch.setattr(MultiheadAttention, "forward", lambda *a, **k: count.append(1) or forward(*a, **k))
    real = ~padding[..., None]
    for training in (True, False):
        for call in calls:
            model.train(training)
            with torch.set_grad_enabled(training):
                expected = model(x, **call)
                before = dict(model.named_parameters())
                assert replace_attention(model) is model
                found = model(x, **call)
                assert len(count) == 2 and dict(model.named_parameters()).keys() == before.keys()
                assert all(p is before[name] for name, p in model.named_parameters())
                torch.testing.assert_close(found * real, expected * real, rtol=0, atol=2e-5)
                restore_attention(model)
                assert torch.equal(model(x, **call) * real, expected * real) and len(count) == 2
                count.clear()


def test_a_whole_transformer_trains_alike():
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    twin = replace_attention(copy.deepcopy(model))
    assert sum(type(part) is MultiheadAttention for part in twin.modules()) == 3
    source, target = torch.randn(2, 7, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    for one in (model, twin):
        one(source, target, tgt_mask=mask, tgt_is_causal=True).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    clone = copy.deepcopy(twin)
    assert torch.equal(clone(source, target), twin(source, target))


def test_what_is_no_plain_module_is_left_alone():
    class Special(nn.MultiheadAttention):
        pass

    model = nn.ModuleList([Special(8, 2), nn.MultiheadAttention(8, 2), nn.Linear(3, 3)])
    assert [type(part) for part in replace_attention(model)] == [Special, MultiheadAttention, nn.Linear]
    assert type(restore_attention(model)[1]) is nn.MultiheadAttention
    assert type(replace_attention(nn.MultiheadAttention(8, 2))) is MultiheadAttention
    for function in (replace_attention, restore_attention):
        with pytest.raises(TypeError, match=rf"^{function.__name__}: expected a torch.nn.Module, found int"):
            function(3)


def test_a_model_without_attention_modules_is_left_as_it_is_with_a_warning():
    with pytest.warns(UserWarning, match="^replace_attention: Linear has no torch.nn.MultiheadAttention.*transformers"):
        replace_attention(nn.Linear(2, 2))
    replace_attention(replace_attention(nn.MultiheadAttention(8, 2)))  # again is safe, and no news


# ---- Query, key and value out of one product ----


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shared", ["all", "key and value"])
def test_gradients_go_back_into_one_projection_without_a_copy(batch_first, shared):
    layer = MultiheadAttention(16, 4, batch_first=batch_first)
    x, y = torch.randn(3, 5, 16, requires_grad=True), torch.randn(3, 5, 16)
    inputs = (x, x, x) if shared == "all" else (x, y, y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = layer(*inputs, need_weights=False)[0]
        found = torch.autograd.grad(out, [x, *layer.parameters()], y)
    copies = {event.key for event in profile.key_averages()} & {"aten::cat", "aten::clone", "aten::contiguous"}
    assert not copies
    other = nn.MultiheadAttention(16, 4, batch_first=batch_first)
    other.load_state_dict(layer.state_dict())
    expected = torch.autograd.grad(other(*inputs, need_weights=False)[0], [x, *other.parameters()], y)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_parts_of_a_projection_with_other_gradients():
    from headway.torch._parts import split

    joined = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: split(x, 3, False), joined)
    torch.autograd.gradgradcheck(lambda x: tuple(part.sin() for part in split(x, 3, False)), joined)
    one, _, three = split(joined, 3, False)
    (one.sum() - 2 * three.sum()).backward()
    assert torch.equal(joined.grad[0, 0], torch.tensor([1.0] * 4 + [0.0] * 4 + [-2.0] * 4, dtype=torch.float64))


def test_nested_tensors_are_items_of_their_own_lengths():
    torch.manual_seed(4)
    layer = headway.torch.MultiheadAttention(16, 4, batch_first=True, kdim=16).eval()
    items = [torch.randn(length, 16, requires_grad=True) for length in (5, 1, 8)]
    whole = torch.nested.as_nested_tensor(items, layout=torch.jagged)
    out, weights = layer(whole, whole, whole, need_weights=False)
    assert out.is_nested and weights is None
    (out + whole).values().sum().backward()  # its lengths are those of the query, as a residual needs them to be
    for item, found in zip(items, out.unbind()):
        torch.testing.assert_close(found, layer(item, item, item, need_weights=False)[0], atol=1e-5, rtol=1e-5)
        assert item.grad is not None
    for how in ({}, {"need_weights": False, "attn_mask": torch.zeros(5, 5)}):
        with pytest.raises(NotImplementedError, match="query is nested, expected batch_first=True, need_weights=False"):
            layer(whole, whole, whole, **how)
    with pytest.raises(NotImplementedError, match="key or value is nested, and query is not"):
        layer(items[0], whole, whole)
