"""The functions and the layer of documents 000, 002 and 003, against the documents' own steps."""

import errno
import subprocess
from pathlib import Path

import numpy as np
import pytest

import headway
from cases import DTYPES
from headway.functions import split_heads


def softmax(scores):
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def document_000(Q, K, V, n_heads):
    """Its steps, with the keys' own length."""
    batch, _, d_model = Q.shape
    d_k = d_model // n_heads
    q, k, v = (x.reshape(batch, x.shape[1], n_heads, d_k).transpose(0, 2, 1, 3) for x in (Q, K, V))
    mixed = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(d_k)) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(Q.shape)


def document_002(Q, K, V, n_heads):
    """Head by head along the features."""
    heads = [np.split(x, n_heads, axis=1) for x in (Q, K, V)]
    return np.concatenate([softmax(q @ k.T / np.sqrt(q.shape[1])) @ v for q, k, v in zip(*heads)], axis=1)


class Document003:
    """Its listing, with the softmax taken out of the `if`."""

    def __init__(self, num_hiddens, num_heads, dropout=0.0, bias=False):
        self.num_heads = num_heads
        for name in "qkvo":
            setattr(self, f"W_{name}", np.random.rand(num_hiddens, num_hiddens))
        for name in "qkvo":
            setattr(self, f"b_{name}", np.random.rand(num_hiddens) if bias else np.zeros(num_hiddens))

    def transpose_qkv(self, X):
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).transpose(0, 2, 1, 3)
        return X.reshape(-1, X.shape[2], X.shape[3])

    def transpose_output(self, X):
        X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2]).transpose(0, 2, 1, 3)
        return X.reshape(X.shape[0], X.shape[1], -1)

    def scaled_dot_product_attention(self, Q, K, V, valid_lens):
        scores = np.matmul(Q, K.transpose(0, 2, 1)) / np.sqrt(Q.shape[-1])
        if valid_lens is not None:
            lens = valid_lens[:, None, None] if valid_lens.ndim == 1 else valid_lens[:, :, None]
            scores = np.where(np.arange(scores.shape[-1]) < lens, scores, -np.inf)
        return np.matmul(softmax(scores), V)

    def forward(self, queries, keys, values, valid_lens):
        queries = self.transpose_qkv(np.dot(queries, self.W_q) + self.b_q)
        keys = self.transpose_qkv(np.dot(keys, self.W_k) + self.b_k)
        values = self.transpose_qkv(np.dot(values, self.W_v) + self.b_v)
        if valid_lens is not None:
            valid_lens = np.repeat(valid_lens, self.num_heads, axis=0)
        output = self.scaled_dot_product_attention(queries, keys, values, valid_lens)
        return np.dot(self.transpose_output(output), self.W_o) + self.b_o


# ---- 000 and 002 ----


@pytest.mark.parametrize("keys", [64, 100])
def test_document_000(keys):
    rng = np.random.default_rng(0)
    Q, K, V = rng.standard_normal((2, 64, 64)), rng.standard_normal((2, keys, 64)), rng.standard_normal((2, keys, 64))
    np.testing.assert_allclose(headway.multi_head_attention(Q, K, V, 8), document_000(Q, K, V, 8), atol=1e-13)
    np.testing.assert_allclose(
        headway.multi_head_attention(Q=Q, K=K, V=V, n_heads=1), document_000(Q, K, V, 1), atol=1e-13
    )


def test_document_002_as_it_stands():
    X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    W_q = W_k = W_v = np.eye(4)
    Q, K, V = headway.compute_qkv(X, W_q, W_k, W_v)
    result = headway.multi_head_attention(Q, K, V, n_heads=2)
    assert result.shape == (2, 4)
    np.testing.assert_allclose(result, document_002(Q, K, V, 2), atol=1e-14)
    np.testing.assert_allclose(headway.self_attention(Q, K, V), document_002(Q, K, V, 1), atol=1e-14)


@pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint8, bool, list])
def test_integers_are_computed_in_float64(kind):
    numbers = np.random.default_rng(0).integers(0, 2, (5, 6))
    X = numbers.tolist() if kind is list else numbers.astype(kind)
    wide = numbers.astype(np.float64)
    for found, expected in [
        (headway.self_attention(X, X, X), document_002(wide, wide, wide, 1)),
        (headway.multi_head_attention(X, X, X, 3), document_002(wide, wide, wide, 3)),
        (headway.compute_qkv(X, np.eye(6, dtype=int), np.eye(6), np.eye(6))[0], wide),
        (headway.compute_qkv(X, *3 * [np.eye(6, dtype=int)])[2], wide),
    ]:
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_functions_compute_in_the_input_s_type(dtype):
    X = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(DTYPES[dtype])
    W = np.eye(8).astype(DTYPES[dtype])
    assert headway.multi_head_attention(X, X, X, 2).dtype == DTYPES[dtype]
    assert headway.multi_head_attention(X[0], X[0], X[0], 2).dtype == DTYPES[dtype]
    assert headway.self_attention(X[0], X[0], X[0]).dtype == DTYPES[dtype]
    assert all(x.dtype == DTYPES[dtype] for x in headway.compute_qkv(X[0], W, W, W))


def test_both_forms_agree_and_take_any_strides():
    X = np.random.default_rng(0).standard_normal((2, 8, 5)).swapaxes(1, 2)
    both = headway.multi_head_attention(X, X[:, ::-1], X[:, ::-1], 4)
    for b in range(2):
        assert np.array_equal(both[b], headway.multi_head_attention(X[b], X[b, ::-1], X[b, ::-1], 4))
    assert headway.multi_head_attention(X[:, :0], X, X, 4).shape == (2, 0, 8)


def test_what_does_not_fit_is_named_with_its_numbers():
    X = np.ones((2, 5, 10))
    for call in (
        lambda: headway.multi_head_attention(X, X, X, 4),
        lambda: headway.multi_head_attention(X[0], X[0], X[0], 4),
    ):
        with pytest.raises(ValueError, match="10.*4"):
            call()
    with pytest.raises(ValueError, match="^MultiHeadAttention: num_hiddens is -8, expected 0 or more$"):
        headway.MultiHeadAttention(-8, 2)
    with pytest.raises(ValueError, match="multi_head_attention: the number of heads is 0, expected 1 or more"):
        headway.multi_head_attention(X, X, X, 0)
    with pytest.raises(ValueError, match=r"K has shape \(5, 10\)"):
        headway.multi_head_attention(X, X[0], X[0], 2)
    with pytest.raises(ValueError, match="^multi_head_attention: K has head_dim 4, Q has 5"):
        headway.multi_head_attention(X, X[..., :8], X[..., :8], 2)
    with pytest.raises(ValueError, match="^self_attention: V has length 3, K has 5"):
        headway.self_attention(X, X, X[:, :3])
    with pytest.raises(ValueError, match=r"^MultiHeadAttention: valid_lens has shape \(3,\)"):
        headway.MultiHeadAttention(10, 2)(X, X, X, valid_lens=[1, 2, 3])
    with pytest.raises(ValueError, match=r"W_k has shape \(3, 3\), X has \(5, 10\)"):
        headway.compute_qkv(X[0], np.eye(10), np.eye(3), np.eye(10))
    with pytest.raises(TypeError, match="complex128"):
        headway.self_attention(X[0] * 1j, X[0], X[0])
    with pytest.raises(TypeError, match="object"):
        headway.self_attention(X[0].astype(object), X[0], X[0])


# ---- 003 ----


def layers(num_hiddens, num_heads, bias, seed=7):
    np.random.seed(seed)
    original = Document003(num_hiddens, num_heads, bias=bias)
    np.random.seed(seed)
    return original, headway.MultiHeadAttention(num_hiddens, num_heads, dropout=0.5, bias=bias)


def assert_relative(found, expected, bound=1e-12):
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * np.abs(expected).max())


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_seed_gives_the_document_s_numbers(bias):
    original, layer = layers(100, 5, bias)
    for name in ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o"):
        assert np.array_equal(getattr(layer, name), getattr(original, name))
        assert type(getattr(layer, name)) is np.ndarray
    X, Y = np.random.rand(2, 4, 100), np.random.rand(2, 6, 100)
    for valid_lens in (np.array([3, 2]), None, np.array([[1, 2, 3, 4], [6, 5, 2, 1]])):
        expected = original.forward(X, Y, Y, valid_lens)
        found = layer.forward(X, Y, Y, valid_lens)
        assert found.shape == (2, 4, 100) and found.dtype == np.float64
        assert_relative(found, expected)
    assert_relative(layer.forward(X, Y, Y, [3, 2]), original.forward(X, Y, Y, np.array([3, 2])))
    assert_relative(layer(X, X, X), original.forward(X, X, X, None))


def test_the_layer_s_parts_are_the_document_s():
    original, layer = layers(12, 3, True)
    X = np.random.rand(2, 4, 12)
    split = layer.transpose_qkv(X)
    assert np.array_equal(split, original.transpose_qkv(X)) and np.array_equal(layer.transpose_output(split), X)
    for valid_lens in (None, np.array([1, 2, 3, 4, 3, 2]), np.random.randint(1, 5, (6, 4))):
        expected = original.scaled_dot_product_attention(split, split, split, valid_lens)
        assert_relative(layer.scaled_dot_product_attention(split, split, split, valid_lens), expected)
    assert layer.num_hiddens == 12 and layer.num_heads == 3 and layer.d_k == layer.d_v == 4
    assert repr(layer) == "MultiHeadAttention(num_hiddens=12, num_heads=3, dropout=0.5, bias=True)"


def test_a_valid_length_of_zero_gives_zero_attention():
    _, layer = layers(12, 3, True)
    X = np.random.rand(2, 4, 12)
    found = layer.forward(X, X, X, np.array([0, 4]))
    np.testing.assert_allclose(found[0], np.broadcast_to(layer.b_o, (4, 12)))


def test_dropout_acts_in_training_and_follows_np_random():
    _, layer = layers(12, 3, False)
    X = np.random.rand(2, 8, 12)
    plain = layer.forward(X, X, X, None)
    np.random.seed(1)
    first, second = (layer.forward(X, X, X, None, training=True) for _ in range(2))
    np.random.seed(1)
    again = layer.forward(X, X, X, None, training=True)
    assert np.array_equal(first, again) and not np.array_equal(first, second) and not np.array_equal(first, plain)
    state = np.random.get_state()[1].copy()
    assert np.array_equal(layer.forward(X, X, X, None), plain)
    assert np.array_equal(np.random.get_state()[1], state)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lens", [None, np.array([2, 5]), np.array([[1, 2, 3], [0, 5, 4]])])
def test_backward_gives_every_gradient_by_name(bias, lens, training):
    np.random.seed(3)
    layer = headway.MultiHeadAttention(8, 2, dropout=0.3, bias=bias)
    for name in ("W_q", "W_k"):  # small enough for a soft softmax
        setattr(layer, name, getattr(layer, name) - 0.5)
    inputs = {"queries": np.random.randn(2, 3, 8), "keys": np.random.randn(2, 5, 8), "values": np.random.randn(2, 5, 8)}
    grad = np.random.randn(2, 3, 8)

    def loss():
        np.random.seed(4)
        return (layer.forward(**inputs, valid_lens=lens, training=training) * grad).sum()

    loss()
    gradients = layer.backward(grad)
    assert list(sorted(gradients)) == sorted(
        ["W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o", "queries", "keys", "values"]
    )
    rng = np.random.default_rng(0)
    for name, gradient in gradients.items():
        place = inputs[name] if name in inputs else getattr(layer, name)
        assert gradient.shape == place.shape
        for _ in range(3):  # central differences at three places
            index = tuple(rng.integers(0, size) for size in place.shape)
            before, step = place[index], 1e-5
            place[index] = before + step
            above = loss()
            place[index] = before - step
            below = loss()
            place[index] = before
            np.testing.assert_allclose(gradient[index], (above - below) / (2 * step), rtol=1e-5, atol=1e-6)


def test_the_layer_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="100.*6"):
        headway.MultiHeadAttention(100, 6)
    with pytest.raises(ValueError, match="MultiHeadAttention: the number of heads is 0, expected 1 or more"):
        headway.MultiHeadAttention(100, 0)
    with pytest.raises(ValueError, match="dropout is 1.5"):
        headway.MultiHeadAttention(100, 5, dropout=1.5)
    layer = headway.MultiHeadAttention(12, 3)
    X = np.ones((2, 4, 12))
    with pytest.raises(ValueError, match="backward: expected a forward"):
        layer.backward(X)
    with pytest.raises(ValueError, match=r"keys has shape \(2, 4, 11\), expected \(batch, length, 12\)"):
        layer.forward(X, X[..., :11], X, None)
    with pytest.raises(ValueError, match=r"valid_lens\[1\] is 5, expected 0 to 4"):
        layer.forward(X, X, X, np.array([4, 5]))
    layer.forward(X, X, X, None)
    with pytest.raises(ValueError, match=r"grad has shape \(2, 4\), expected \(2, 4, 12\)"):
        layer.backward(X[..., 0])


def test_a_wrong_argument_of_the_functions_is_named():
    X = np.ones((2, 4))
    with pytest.raises(TypeError, match="^self_attention: Q is None, expected an array"):
        headway.self_attention(None, X, X)
    with pytest.raises(
        ValueError, match=r"^compute_qkv: W_q has shape \(3, 3\), X has \(2, 4\): expected \(4, d_out\)"
    ):
        headway.compute_qkv(X, np.eye(3), np.eye(4), np.eye(4))


def test_integers_and_empty_batches_go_through_the_layer():
    layer = headway.MultiHeadAttention(4, 2)
    X = np.arange(24).reshape(2, 3, 4)
    assert layer.forward(X, X, X, None).dtype == np.float64
    assert layer.backward(np.ones((2, 3, 4)))["queries"].shape == (2, 3, 4)
    empty = np.ones((0, 3, 4))
    assert layer.forward(empty, empty, empty, None).shape == (0, 3, 4)
    assert layer.backward(empty)["W_q"].shape == (4, 4)


def test_a_float32_layer_stays_in_float32():
    layer = headway.MultiHeadAttention(4, 2, bias=True)
    for name in "qkvo":
        setattr(layer, f"W_{name}", getattr(layer, f"W_{name}").astype(np.float32))
        setattr(layer, f"b_{name}", getattr(layer, f"b_{name}").astype(np.float32))
    X = np.ones((2, 3, 4), np.float32)
    assert layer.forward(X, X, X, None).dtype == np.float32
    assert all(gradient.dtype == np.float32 for gradient in layer.backward(X).values())


# ---- The layer beyond its document ----


def test_the_layer_takes_masks_and_causal_and_gives_weights():
    layer, x = headway.MultiHeadAttention(8, 2, bias=True), np.random.rand(2, 5, 8)
    seen = np.tri(5, dtype=bool)
    out, weights = layer.forward(x, x, x, causal=True, return_weights=True)
    masked, same = layer.forward(x, x, x, mask=seen, return_weights=True)
    assert weights.shape == (2, 2, 5, 5)
    np.testing.assert_array_equal(out, masked)
    np.testing.assert_array_equal(weights, same)
    q, k, v = (split_heads(x @ getattr(layer, f"W_{part}") + getattr(layer, f"b_{part}"), 2) for part in "qkv")
    scores = np.where(seen, q @ k.swapaxes(-1, -2) / 2, -np.inf)
    expected = np.exp(scores - scores.max(-1, keepdims=True))
    expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    np.testing.assert_allclose(out, (expected @ v).swapaxes(1, 2).reshape(2, 5, 8) @ layer.W_o + layer.b_o, rtol=1e-12)
    gradient = layer.backward(np.ones_like(out))["queries"]
    layer.forward(x, x, x, mask=seen)
    np.testing.assert_array_equal(layer.backward(np.ones_like(out))["queries"], gradient)
    with pytest.raises(TypeError, match="^MultiHeadAttention: mask"):
        layer.forward(x, x, x, mask=np.ones((5, 5), int))


def test_the_layer_computes_in_the_type_that_it_is_given():
    layer, x = headway.MultiHeadAttention(8, 2, dropout=0.25, bias=True), np.random.rand(1, 3, 8)
    narrow = layer.astype(np.float32)
    assert (narrow.W_q.dtype, layer.W_q.dtype, narrow.dropout) == (np.float32, np.float64, 0.25)
    out = narrow.forward(*[x.astype(np.float32)] * 3)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, layer.forward(x, x, x), rtol=1e-5)
    with pytest.raises(TypeError, match="MultiHeadAttention.astype: dtype is int64, expected floating"):
        layer.astype(int)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_comes_back_from_its_file(tmp_path, dtype, bias):
    layer, path = headway.MultiHeadAttention(12, 3, bias=bias).astype(dtype), tmp_path / "layer.safetensors"
    state = np.random.get_state()[1].copy()
    layer.save(path)
    again = headway.MultiHeadAttention.load(path, dropout=0.5)
    assert repr(again) == f"MultiHeadAttention(num_hiddens=12, num_heads=3, dropout=0.5, bias={bias})"
    for name in ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o"):
        assert getattr(again, name).dtype == dtype
        np.testing.assert_array_equal(getattr(again, name), getattr(layer, name))
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    with pytest.raises(OSError, match="^MultiHeadAttention.save: .*layer.safetensors: the file exists"):
        layer.save(path)
    layer.save(path, overwrite=True)
    with pytest.raises(OSError, match="^MultiHeadAttention.load: .*none.safetensors: cannot open"):
        headway.MultiHeadAttention.load(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(
        OSError, match="^MultiHeadAttention.load: .*bad.safetensors: expected the metadata to say layer"
    ):
        headway.MultiHeadAttention.load(tmp_path / "bad.safetensors")


def test_errors_of_files_are_those_of_open(tmp_path):
    layer, path = headway.MultiHeadAttention(4, 2), tmp_path / "layer.safetensors"
    layer.save(path)
    (tmp_path / "folder").mkdir()
    load = headway.MultiHeadAttention.load
    for call, error, number, text in [
        (lambda: load(tmp_path / "none"), FileNotFoundError, errno.ENOENT, "load: .*none: cannot open: No such file"),
        (lambda: load(tmp_path / "folder"), IsADirectoryError, errno.EISDIR, "load: .*folder: cannot read: Is a dir"),
        (lambda: load(path / "under"), NotADirectoryError, errno.ENOTDIR, "load: .*under: cannot open: Not a dir"),
        (lambda: layer.save(path), FileExistsError, errno.EEXIST, "save: .*layer.safetensors: the file exists"),
        (lambda: layer.save(tmp_path / "folder"), IsADirectoryError, errno.EISDIR, "save: .*: cannot write: Is a dir"),
        (lambda: layer.save(tmp_path / "no" / "l"), FileNotFoundError, errno.ENOENT, "save: .*l: cannot create a file"),
    ]:
        with pytest.raises(error, match=f"^MultiHeadAttention.{text}") as raised:
            call()
        assert raised.value.errno == number
    (tmp_path / "short").write_bytes(b"abc")  # a violated format is no failure of the system
    with pytest.raises(OSError, match="^MultiHeadAttention.load: .*short: expected at least 8 bytes") as raised:
        load(tmp_path / "short")
    assert type(raised.value) is OSError and raised.value.errno is None


def test_a_name_that_says_another_format_is_refused(tmp_path):
    layer = headway.MultiHeadAttention(4, 2)
    for name in ("l.npz", "l.npy", "l.pt", "a.safetensors.h5"):
        with pytest.raises(ValueError, match=rf"^MultiHeadAttention.save: .*{name}: expected .* ends in .safetensors"):
            layer.save(tmp_path / name, overwrite=True)
    assert list(tmp_path.iterdir()) == []
    for name in ("layer", "layer.v2", "l.npz.safetensors"):
        layer.save(tmp_path / name)
        assert headway.MultiHeadAttention.load(tmp_path / name).num_heads == 2


def test_a_layer_of_the_command_is_read(tmp_path):
    command = Path(headway.__file__).parents[1] / "bin" / "headway"
    if not command.exists():
        pytest.skip("the package was installed without its command")
    for name, heads, fits in [("a", "2", True), ("b", "1", False)]:
        arguments = ["--model-dim", "8", "--heads", "2", "--kv-heads", heads, "--dtype", "bf16", "--bias"]
        subprocess.run([command, "layer-init", *arguments, "-o", tmp_path / f"{name}.safetensors"], check=True)
        if fits:
            layer = headway.MultiHeadAttention.load(tmp_path / "a.safetensors")
            assert (layer.num_heads, layer.W_q.shape, layer.W_q.dtype, layer.b_q.shape) == (2, (8, 8), np.float32, (8,))
        else:
            with pytest.raises(ValueError, match="2 heads of 4 and 1 of keys and values, expected as many"):
                headway.MultiHeadAttention.load(tmp_path / "b.safetensors")
