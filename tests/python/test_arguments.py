"""Arguments of the wrong kind: the error begins with the function that was called, and names the argument."""

import numpy as np
import pytest

import headway
from headway import masks

X = np.random.default_rng(0).standard_normal((1, 2, 4, 8), dtype=np.float32)
ROWS = X[0, 0]
OUT, LSE = headway.attention(X, X, X, return_lse=True)
RAGGED = [[1.0], [1.0, 2.0]]


def refused(call, error, *words):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value.args[0] if isinstance(caught.value, KeyError) else caught.value)
    assert text.startswith(f"{words[0]}:"), text
    assert "incompatible function arguments" not in text and len(text) < 400, text
    for word in words[1:]:
        assert word in text, text


@pytest.mark.parametrize(
    ("operation", "call", "name"),
    [
        ("attention", lambda v: headway.attention(X, X, X, return_weights=v), "return_weights"),
        ("attention", lambda v: headway.attention(X, X, X, return_lse=v), "return_lse"),
        ("attention", lambda v: headway.attention(X, X, X, batch_invariant=v), "batch_invariant"),
        ("attention_scores", lambda v: headway.attention_scores(X, X, batch_invariant=v), "batch_invariant"),
        (
            "attention_backward",
            lambda v: headway.attention_backward(OUT, X, X, X, OUT, LSE, bias_gradient=v),
            "bias_gradient",
        ),
        ("explain", lambda v: headway.explain(X, X, X, backward=v), "backward"),
        ("rope", lambda v: headway.rope(X, range(4), interleaved=v), "interleaved"),
        ("MultiHeadAttention", lambda v: headway.MultiHeadAttention(8, 2, bias=v), "bias"),
        ("view", lambda v: headway.view(X, X, overwrite=v), "overwrite"),
    ],
)
@pytest.mark.parametrize("value", [X, np.zeros(0), masks.causal()], ids=["array", "empty", "mask"])
def test_what_is_neither_true_nor_false_is_refused_by_name(operation, call, name, value):
    refused(lambda: call(value), TypeError, operation, name, "expected True or False")


@pytest.mark.parametrize("method", ["pairs", "draw", "to_bool", "spans"])
def test_methods_of_masks_name_themselves_and_their_arguments(method):
    call = getattr(masks.causal(), method)
    name = f"Mask.{method}"
    refused(lambda: call("3", 3), TypeError, name, "queries is '3'", "expected an integer")
    refused(lambda: call(3, 2.5), TypeError, name, "keys is 2.5")
    refused(lambda: call(3, 10**30), ValueError, name, "keys", "2^63")
    refused(lambda: call(3), TypeError, name, "keys is missing")
    refused(lambda: call(3, keys=None), TypeError, name, "keys is missing")
    refused(lambda: call(3, 3, 3), TypeError, name, "3 arguments")
    refused(lambda: call(3, key=3), TypeError, name, "keyword key")
    refused(lambda: call(3, 3, keys=3), TypeError, name, "keys a second time")
    assert call(queries=3, keys=3) is not None


def test_masks_refuse_numbers_past_64_bits_and_lists_of_unequal_lengths():
    keep = np.ones((2, 2), bool)
    refused(lambda: masks.blocks(keep, 10**30), ValueError, "masks.blocks", "size")
    refused(lambda: masks.spans([[[0, 1]]], rows=10**30), ValueError, "masks.spans", "rows")
    refused(lambda: masks.dense(RAGGED), ValueError, "masks.dense", "array", "rows of equal length")
    refused(lambda: masks.from_bool(RAGGED), ValueError, "masks.from_bool", "array", "rows of equal length")
    refused(lambda: masks.blocks(RAGGED, 1), ValueError, "masks.blocks", "keep", "rows of equal length")


def test_rope_names_what_is_missing_or_too_large():
    refused(lambda: headway.rope(None, [0]), TypeError, "rope", "x")
    refused(lambda: headway.rope(X, None), TypeError, "rope", "positions")
    refused(lambda: headway.rope_backward(None, [0]), TypeError, "rope_backward", "grad_out")
    refused(lambda: headway.rope_frequencies("8"), TypeError, "rope_frequencies", "head_dim is '8'")
    refused(lambda: headway.rope_frequencies(10**30), ValueError, "rope_frequencies", "head_dim")
    refused(lambda: headway.rope(X, range(4), scaling={"rope_type": X}), ValueError, "rope", "rope_type")


def test_frequencies_of_more_pairs_than_memory_holds_are_refused_at_once():
    refused(lambda: headway.rope_frequencies(2**62), MemoryError, "rope_frequencies")


def test_the_cache_names_arrays_in_place_of_integers_and_paths(tmp_path):
    refused(lambda: headway.KVCache(X, 4, 2, 8), TypeError, "KVCache", "pages is", "expected an integer")
    refused(lambda: headway.KVCache(4, 4, 2, 8, quantize=X), TypeError, "KVCache", "quantize")
    refused(lambda: headway.KVCache(4, 4, 2, 8, window=X), TypeError, "KVCache", "window")
    refused(lambda: headway.KVCache(4, 4, 2, 8, device="cuda:" + "9" * 30), ValueError, "KVCache", "device")
    cache = headway.KVCache(4, 4, 2, 8)
    for method in ("fork", "remove", "length", "read"):
        refused(lambda method=method: getattr(cache, method)(X), TypeError, f"KVCache.{method}", "id is")
    refused(lambda: cache.fork(10**30), KeyError, "KVCache.fork", "no sequence")
    refused(lambda: cache.append(None, X, X), TypeError, "KVCache.append", "ids")
    refused(lambda: cache.append([cache.add()], None, X), TypeError, "KVCache.append", "key")
    refused(lambda: cache.save(3), TypeError, "KVCache.save", "path is 3")
    refused(lambda: headway.KVCache.load(None), TypeError, "KVCache.load", "path is None")
    refused(lambda: headway.KVCache.load(tmp_path / "none"), OSError, "KVCache.load", "No such file")
    cache.save(tmp_path / "cache.safetensors")
    refused(lambda: cache.save(tmp_path / "cache.safetensors"), OSError, "KVCache.save", "exists")


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("self_attention", lambda v: headway.self_attention(ROWS, v, ROWS)),
        ("multi_head_attention", lambda v: headway.multi_head_attention(ROWS, v, ROWS, 2)),
        ("compute_qkv", lambda v: headway.compute_qkv(ROWS, v, np.eye(8), np.eye(8))),
        (
            "MultiHeadAttention.scaled_dot_product_attention",
            lambda v: headway.MultiHeadAttention(8, 2).scaled_dot_product_attention(X[0], v, X[0]),
        ),
        ("trace", lambda v: headway.trace(ROWS, v, ROWS)),
    ],
)
def test_functions_of_the_tutorials_name_themselves(operation, call):
    refused(lambda: call(RAGGED), ValueError, operation, "rows of equal length")
    for value in ("abc", np.zeros(3, "M8[s]"), np.zeros(3, [("a", "f4")]), np.array([None])):
        refused(lambda value=value: call(value), TypeError, operation, "has type")
    refused(lambda: call(None), TypeError, operation, "is None, expected an array")


class NoArray:
    """Says that it has DLPack, and has no shape."""

    def __dlpack__(self, **_):
        raise RuntimeError


def test_what_only_says_that_it_is_an_array_is_refused():
    refused(lambda: headway.compute_qkv(NoArray(), ROWS, ROWS, ROWS), TypeError, "compute_qkv", "X is a NoArray")
    refused(lambda: headway.multi_head_attention(ROWS, ROWS, NoArray(), 2), TypeError, "multi_head_attention", "V is")


def test_one_head_may_be_said_as_true():
    assert np.array_equal(
        headway.multi_head_attention(ROWS, ROWS, ROWS, True), headway.self_attention(ROWS, ROWS, ROWS)
    )


def test_the_numpy_layer_names_its_arguments():
    layer = headway.MultiHeadAttention(8, 2)
    refused(lambda: headway.MultiHeadAttention("8", 2), TypeError, "MultiHeadAttention", "num_hiddens is '8'")
    refused(
        lambda: headway.MultiHeadAttention(8, 2, dropout="0.1"), TypeError, "MultiHeadAttention", "dropout is '0.1'"
    )
    refused(lambda: headway.MultiHeadAttention(8, 2, dropout=ROWS), TypeError, "MultiHeadAttention", "dropout")
    refused(lambda: layer.forward(RAGGED, X[0], X[0]), ValueError, "MultiHeadAttention", "queries", "equal length")
    refused(lambda: layer.transpose_qkv(ROWS), ValueError, "MultiHeadAttention.transpose_qkv", "X has shape (4, 8)")
    refused(lambda: layer.transpose_output(X[0][:1]), ValueError, "MultiHeadAttention.transpose_output", "X has shape")
    refused(lambda: layer.astype("abc"), TypeError, "MultiHeadAttention.astype", "dtype is 'abc'")
    refused(lambda: layer.save(3), TypeError, "MultiHeadAttention.save", "path is 3")
    refused(lambda: headway.MultiHeadAttention.load(3), TypeError, "MultiHeadAttention.load", "path is 3")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("W_q", None, "W_q is None, expected an array"),
        ("W_k", np.ones(8), "W_k has shape (8,), expected (in, out)"),
        ("W_v", np.ones((8, 7)), "W_v has shape (8, 7)"),
        ("W_o", np.ones((7, 8)), "W_o has shape (7, 8), expected (8, out)"),
        ("b_q", "abc", "b_q has type"),
        ("b_o", np.ones(7), "b_o has shape (7,), expected (8,)"),
    ],
)
def test_a_parameter_that_was_replaced_by_something_else_is_named(name, value, words):
    layer = headway.MultiHeadAttention(8, 2, bias=True)
    setattr(layer, name, value)
    refused(lambda: layer.forward(X[0], X[0], X[0]), (TypeError, ValueError), "MultiHeadAttention", words)


def test_an_empty_batch_passes_through_the_layers_transpositions():
    layer = headway.MultiHeadAttention(8, 2)
    split = layer.transpose_qkv(np.zeros((0, 3, 8)))
    assert split.shape == (0, 3, 4)
    assert layer.transpose_output(split).shape == (0, 3, 8)


def test_conversions_name_what_is_no_dict_and_no_layer():
    convert = headway.convert
    refused(lambda: convert.from_torch(3, 2), TypeError, "from_torch", "state_dict is 3", "dict")
    refused(lambda: convert.from_keras(None), TypeError, "from_keras", "weights is None")
    refused(lambda: convert.from_flax([1]), TypeError, "from_flax", "params is [1]")
    refused(lambda: convert.from_flax({"params": 3}), TypeError, "from_flax", "params['params'] is 3")
    refused(lambda: convert.from_flax({3: ROWS}), TypeError, "from_flax", "key 3")
    refused(
        lambda: convert.from_torch({"out_proj.weight": RAGGED}, 2), ValueError, "from_torch", "out_proj.weight", "equal"
    )
    for name in ("to_torch", "to_keras", "to_flax"):
        refused(lambda name=name: getattr(convert, name)({}), TypeError, name, "layer is {}")


def test_pictures_name_their_arguments(tmp_path):
    pytest.importorskip("matplotlib")
    refused(lambda: headway.plot_heads(X), TypeError, "plot_heads", "headway.analyze")
    refused(lambda: headway.plot_row(X, X, "1"), TypeError, "plot_row", "row is '1'")
    refused(lambda: headway.plot_row(3, X, 1), ValueError, "plot_row", "query is 3")
    refused(lambda: headway.view(X, X, path=3), TypeError, "view", "path is 3")
    refused(lambda: headway.view(X, X, tokens=3, path=tmp_path / "x.html"), TypeError, "view", "tokens is 3")
    refused(lambda: headway.view(X, X, progress=3, path=tmp_path / "y.html"), TypeError, "view", "progress is 3")
    refused(lambda: headway.analyze(X, X, progress="yes"), TypeError, "analyze", "progress is 'yes'")
    refused(lambda: headway.trace(ROWS, ROWS, ROWS, tokens=3), TypeError, "trace", "tokens is 3")


def test_a_row_of_bshd_arrays_is_plotted():
    pytest.importorskip("matplotlib")
    ax = headway.plot_row(X.swapaxes(1, 2), X.swapaxes(1, 2), 3, head=1, layout="bshd")  # 4 rows, 2 heads
    assert ax.get_title() == "row 3, head 1"
