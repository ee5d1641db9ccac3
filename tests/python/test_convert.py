"""headway.convert: weights from other libraries, and back."""

import numpy as np
import pytest

import headway
from cases import check_examples
from headway import convert


def trained(num_hiddens=12, num_heads=3, bias=True, dtype=np.float64):
    layer = headway.MultiHeadAttention(num_hiddens, num_heads, bias=bias)
    rng = np.random.default_rng(0)
    for name in ("W_q", "W_k", "W_v", "W_o", *(("b_q", "b_k", "b_v", "b_o") if bias else ())):
        setattr(layer, name, rng.standard_normal(getattr(layer, name).shape).astype(dtype))
    return layer


def same(one, other):
    names = [f"{kind}_{part}" for kind in "Wb" for part in "qkvo"]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_the_examples_run():
    for name in convert.__all__:
        check_examples(getattr(convert, name))
    check_examples(convert)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("framework", ["torch", "keras", "flax"])
def test_there_and_back_is_the_same(framework, bias):
    layer = trained(bias=bias)
    there = getattr(convert, f"to_{framework}")(layer)
    heads = {"num_heads": 3} if framework == "torch" else {}
    back = getattr(convert, f"from_{framework}")(there, **heads, dropout=0.25)
    assert same(layer, back) and repr(back) == repr(layer).replace("dropout=0.0", "dropout=0.25")
    back.W_q[:] = 0  # a copy: nothing else changes
    assert same(getattr(convert, f"from_{framework}")(there, **heads), layer)


def test_biases_that_were_set_by_hand_go_along():
    layer = trained(bias=False)
    assert "in_proj_bias" not in convert.to_torch(layer)
    layer.b_v = np.ones(12)
    assert np.array_equal(convert.to_torch(layer)["in_proj_bias"][24:], np.ones(12))


def test_converting_draws_nothing():
    state = convert.to_torch(trained())
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    convert.from_torch(state, num_heads=3)
    assert np.random.rand() == expected


def test_the_type_stays():
    back = convert.from_flax(convert.to_flax(trained(bias=False, dtype=np.float32)))
    x = np.ones((2, 4, 12), np.float32)
    assert back.forward(x, x, x).dtype == np.float32


def test_keras_names_may_have_more_around_them():
    plain = convert.to_keras(trained())
    for rename in (lambda name: "block/attention/" + name, lambda name: "mha/" + name + ":0"):
        assert same(convert.from_keras({rename(name): array for name, array in plain.items()}), trained())
    nested = {"attention": convert._to_kernels(trained(), "attention_output")}
    assert same(convert.from_keras(nested), trained())


def test_keras_kernels_mean_what_keras_means():
    """Its layer in einsums: bqe,ehd->bqhd, then bqhd,hde->bqe."""
    layer = trained()
    w = convert.to_keras(layer)
    x, y = np.random.default_rng(1).standard_normal((2, 2, 4, 12))
    q, k, v = (
        np.einsum("bqe,ehd->bqhd", source, w[f"{name}/kernel"]) + w[f"{name}/bias"]
        for name, source in (("query", x), ("key", y), ("value", y))
    )
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 2
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("bhqk,bkhd->bqhd", weights, v)
    expected = np.einsum("bqhd,hde->bqe", mixed, w["attention_output/kernel"]) + w["attention_output/bias"]
    np.testing.assert_allclose(layer.forward(x, y, y), expected, atol=1e-12)


# ---- The frameworks themselves ----


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 7, "vdim": 5}])
def test_torch(options):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    module = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    layer = convert.from_torch(module.state_dict(), num_heads=3)
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((2, n, options.get(w, 12))) for n, w in ((4, "q"), (6, "kdim"), (6, "vdim"))]
    expected = module(*map(torch.from_numpy, arrays), need_weights=False)[0].detach().numpy()
    np.testing.assert_allclose(layer.forward(*arrays), expected, atol=1e-10)
    other = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **options)
    other.load_state_dict({name: torch.from_numpy(array) for name, array in convert.to_torch(layer).items()})
    again = other(*map(torch.from_numpy, arrays), need_weights=False)[0].detach().numpy()
    np.testing.assert_allclose(again, expected, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_flax(bias):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")
    module = nn.MultiHeadDotProductAttention(num_heads=3, use_bias=bias, bias_init=nn.initializers.normal())
    x, y = np.random.default_rng(1).standard_normal((2, 2, 4, 12)).astype(np.float32)
    variables = module.init(jax.random.key(0), x, y)
    layer = convert.from_flax(variables)
    np.testing.assert_allclose(layer.forward(x, y, y), module.apply(variables, x, y), atol=1e-5)
    back = {"params": convert.to_flax(layer)}
    assert jax.tree.structure(back) == jax.tree.structure(variables)
    np.testing.assert_allclose(module.apply(back, x, y), module.apply(variables, x, y), atol=1e-6)


# ---- What does not fit ----


def test_what_does_not_fit_is_named():
    state = convert.to_torch(trained())

    def torch_with(**changes):
        changed = {**state, **{name.replace("__", "."): array for name, array in changes.items()}}
        return convert.from_torch({name: array for name, array in changed.items() if array is not None}, num_heads=3)

    with pytest.raises(ValueError, match=r"from_torch: in_proj_weight has shape \(35, 12\), expected \(36, 12\)"):
        torch_with(in_proj_weight=np.ones((35, 12)))
    with pytest.raises(ValueError, match=r"from_torch: in_proj_bias has shape \(12,\), expected \(36,\)"):
        torch_with(in_proj_bias=np.ones(12))
    with pytest.raises(ValueError, match=r"from_torch: out_proj.bias is missing, found"):
        torch_with(out_proj__bias=None)
    with pytest.raises(ValueError, match=r"from_torch: q_proj_weight is missing"):
        torch_with(in_proj_weight=None)
    with pytest.raises(ValueError, match=r"from_torch: out_proj.weight has shape \(12, 11\), expected \(12, 12\)"):
        torch_with(out_proj__weight=np.ones((12, 11)))
    with pytest.raises(ValueError, match="from_torch: bias_k, bias_v has no place"):
        torch_with(bias_k=np.ones((1, 1, 12)), bias_v=np.ones((1, 1, 12)))
    with pytest.raises(ValueError, match="from_torch: out_proj.weight has a width of 12, expected a multiple of the 5"):
        convert.from_torch(state, num_heads=5)
    with pytest.raises(ValueError, match="from_torch: out_proj.weight is missing, found nothing"):
        convert.from_torch({}, num_heads=5)

    params = convert.to_flax(trained())
    with pytest.raises(ValueError, match=r"from_flax: key/kernel has shape \(12, 4, 3\), expected \(any, 3, 4\)"):
        convert.from_flax({**params, "key": {**params["key"], "kernel": np.ones((12, 4, 3))}})
    with pytest.raises(ValueError, match="from_flax: query_ln/scale has no place"):
        convert.from_flax({**params, "query_ln": {"scale": np.ones(4)}})
    with pytest.raises(
        ValueError, match=r"from_flax: out/kernel has shape \(3, 4, 11\), expected .* heads \* d = width"
    ):
        convert.from_flax({**params, "out": {"kernel": np.ones((3, 4, 11))}})
    weights = convert.to_keras(trained())
    with pytest.raises(ValueError, match=r"from_keras: query/bias has shape \(12,\), expected \(3, 4\)"):
        convert.from_keras({**weights, "query/bias": np.ones(12)})
    with pytest.raises(ValueError, match="from_keras: value/kernel is missing"):
        convert.from_keras({name: array for name, array in weights.items() if name != "value/kernel"})
    two = {f"encoder/{layer}/{name}": array for layer in ("mha", "mha_1") for name, array in weights.items()}
    with pytest.raises(
        ValueError,
        match="^from_keras: found encoder/mha/query/kernel and encoder/mha_1/query/kernel, expected the weights of one",
    ):
        convert.from_keras(two)
    with pytest.raises(ValueError, match="^from_flax: found first/query/kernel and second/query/kernel, expected"):
        convert.from_flax({"params": {"first": params, "second": params}})


def test_bfloat16_becomes_float32_with_the_same_numbers():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    module = torch.nn.MultiheadAttention(8, 2, dtype=torch.bfloat16)
    layer = headway.convert.from_torch(module.state_dict(), num_heads=2)
    assert layer.W_q.dtype == layer.b_o.dtype == np.float32
    np.testing.assert_array_equal(layer.W_k, module.in_proj_weight[8:16].detach().float().numpy().T)
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    params = headway.convert.to_flax(layer.astype(np.float32))
    halved = {
        name: {kind: array.astype(ml_dtypes.bfloat16) for kind, array in part.items()} for name, part in params.items()
    }
    np.testing.assert_array_equal(headway.convert.from_flax(halved).W_k, layer.W_k)
