"""Serving: attention over pages, the KV cache and RoPE, against the contract's own arithmetic in NumPy."""

import threading

import numpy as np
import pytest

import headway
import oracle
from cases import DTYPES

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def random(rng, shape, dtype="float32"):
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def paged(rng, key, value, page_size, extra=3):
    """Rows (B, Hkv, S, D) of sequences, put into pages in a random order: (key_pages, value_pages, table)."""
    batch, heads, length, _ = key.shape
    count = -(-length // page_size)
    order = rng.permutation(batch * count + extra)
    table = np.full((batch, count + 2), 2**31 - 1, np.int32)  # what is behind the last page is never read
    pages = []
    for rows in (key, value):
        filled = np.full((len(order), page_size, heads, rows.shape[-1]), np.nan).astype(rows.dtype)
        for b in range(batch):
            for n in range(count):
                part = rows[b, :, n * page_size : (n + 1) * page_size].swapaxes(0, 1)
                table[b, n] = order[b * count + n]
                filled[table[b, n], : len(part)] = part
        pages.append(filled)
    return *pages, table


# ---- attention_paged ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_give_what_attention_gives_on_the_gathered_rows(dtype, page_size):
    rng = np.random.default_rng(page_size)
    key, value = random(rng, (3, 2, 37, 8), dtype), random(rng, (3, 2, 37, 6), dtype)
    query = random(rng, (3, 4, 5, 8), dtype)
    pages = paged(rng, key, value, page_size)
    lengths = [37, 1, 20]
    options = {"window": (9, None), "softcap": 3.0, "sinks": np.arange(4.0), "alibi_slopes": np.arange(4) / 8}
    out, lse = headway.attention_paged(query, *pages, lengths, **options, return_lse=True)
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        gathered = key[one, :, :length], value[one, :, :length]
        alone, alone_lse = headway.attention(query[one], *gathered, causal="bottom_right", **options, return_lse=True)
        assert np.array_equal(out[one], alone) and np.array_equal(lse[one], alone_lse)
        answer = oracle.attention(query[one], *gathered, causal="bottom_right", **options)
        assert np.allclose(out[one].astype(float), answer.out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    everything = headway.attention_paged(query, *pages, lengths, causal=False)
    answer = oracle.attention(query[:1], key[:1], value[:1])
    assert np.allclose(everything[:1].astype(float), answer.out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_packed_queries_over_pages_are_as_each_alone():
    rng = np.random.default_rng(0)
    key, value = random(rng, (2, 2, 30, 8)), random(rng, (2, 2, 30, 8))
    pages = paged(rng, key, value, 4)
    query = random(rng, (7, 4, 8))
    out, lse = headway.attention_paged(query, *pages, [30, 12], cu_seqlens_q=[0, 6, 7], return_lse=True)
    assert lse.shape == (4, 7)
    for b, (begin, end, length) in enumerate([(0, 6, 30), (6, 7, 12)]):
        rows = query[begin:end].swapaxes(0, 1)[None]
        alone = headway.attention(rows, key[b : b + 1, :, :length], value[b : b + 1, :, :length], causal="bottom_right")
        assert np.array_equal(out[begin:end].swapaxes(0, 1)[None], alone)


def test_eight_bit_pages_count_as_scale_times_element():
    rng = np.random.default_rng(1)
    pages = rng.integers(-127, 128, (2, 5, 4, 2, 8)).astype(np.int8)
    scales = rng.random((2, 5, 4, 2), dtype=np.float32)
    query, table = random(rng, (1, 4, 3, 8)), [[4, 0, 2]]
    out = headway.attention_paged(query, *pages, table, [11], key_scales=scales[0], value_scales=scales[1])
    rows = (pages * scales[..., None])[:, table[0]].reshape(2, 12, 2, 8)[:, :11].swapaxes(1, 2)[:, None]
    answer = oracle.attention(query, *rows, causal="bottom_right")
    assert np.allclose(out, answer.out, rtol=1e-3, atol=1e-2)


def test_layout_out_and_libraries_of_pages():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    key, value, query = (random(rng, (2, 2, 9, 8)) for _ in range(3))
    pages = paged(rng, key, value, 4)
    expected = headway.attention_paged(query, *pages, [9, 9])
    swapped = headway.attention_paged(query.swapaxes(1, 2).copy(), *pages, [9, 9], layout="bshd")
    assert np.array_equal(swapped.swapaxes(1, 2), expected)
    out = np.empty_like(expected)
    assert headway.attention_paged(query, *pages, [9, 9], out=out) is out and np.array_equal(out, expected)
    tensors = [torch.from_numpy(array) for array in (query, *pages)]
    found = headway.attention_paged(*tensors, torch.tensor([9, 9]))
    assert isinstance(found, torch.Tensor) and np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"lengths": [99]}, ValueError, r"lengths\[0\] is 99, expected 0 to 12"),
        ({"lengths": [-1]}, ValueError, r"lengths\[0\] is -1"),
        ({"block_table": [[0, 7, 1]]}, ValueError, r"block_table\[0, 1\] is 7, expected 0 to 4"),
        ({"block_table": [[0.0, 1.0, 2.0]]}, TypeError, "block_table"),
        ({"mask": None}, TypeError, "unexpected keyword argument 'mask'"),
        ({"dropout": 0.1}, TypeError, "unexpected keyword argument 'dropout'"),
        ({"return_weights": True}, ValueError, "weights"),
        ({"query": np.zeros((1, 2, 1, 9), np.float32)}, ValueError, "head_dim 8, query has 9"),
        ({"query": np.zeros((1, 2, 1, 8))}, TypeError, "f32, expected the query's f64"),
        ({"key_scales": np.ones((5, 4, 2), np.float32)}, ValueError, "scales belong to pages of i8"),
    ],
)
def test_errors_of_pages(change, error, text):
    pages = np.zeros((5, 4, 2, 8), np.float32)
    arguments = {"query": np.zeros((1, 2, 1, 8), np.float32), "key_pages": pages, "value_pages": pages}
    arguments |= {"block_table": [[0, 1, 2]], "lengths": [9]}
    with pytest.raises(error, match=f"^attention_paged.*{text}"):
        headway.attention_paged(**{**arguments, **change})


# ---- RoPE ----


def rotated(x, positions, frequencies, factor=1.0, interleaved=False):
    """x (..., S, D) in float64; positions (..., S)."""
    dims = 2 * len(frequencies)
    angle = np.asarray(positions, float)[..., None] * frequencies
    cos, sin = factor * np.cos(angle), factor * np.sin(angle)
    x = x.astype(float)
    result = x.copy()
    a, b = (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (slice(0, dims // 2), slice(dims // 2, dims))
    result[..., a] = x[..., a] * cos - x[..., b] * sin
    result[..., b] = x[..., b] * cos + x[..., a] * sin
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [None, 4, 0])
def test_rope_rotates_pairs(dtype, interleaved, dims):
    rng = np.random.default_rng(0)
    x = random(rng, (2, 3, 5, 8), dtype)
    frequencies = 100.0 ** (-np.arange(0, dims if dims is not None else 8, 2) / (8 if dims is None else max(dims, 1)))
    tolerance = {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    for positions in (np.array([0, 7, 3, 100, -4]), rng.integers(0, 1000, (2, 5))):
        found = headway.rope(x, positions, base=100, dims=dims, interleaved=interleaved)
        assert found.dtype == x.dtype and found.shape == x.shape
        placed = positions if positions.ndim == 1 else positions[:, None]
        np.testing.assert_allclose(
            found.astype(float), rotated(x, placed, frequencies, 1.0, interleaved), atol=tolerance, rtol=tolerance
        )


HUGGING_FACE = {
    "default": {},
    "linear": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn, its own betas": {
        "factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 20, "beta_slow": 2, "truncate": False,
    },
    "yarn, attention_factor": {"factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 0.7},
    "yarn, mscale": {
        "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0,
    },
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "dynamic": {"factor": 2.0, "seq_len": 5000},
}  # fmt: skip


@pytest.mark.parametrize("case", HUGGING_FACE)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_frequencies_are_those_of_hugging_face(case, share):
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    kind = case.partition(",")[0]
    scaling = {"rope_type": kind, "rope_theta": 50000.0, "partial_rotary_factor": share, **HUGGING_FACE[case]}
    length = scaling.pop("seq_len", None)
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=dict(scaling)
    )
    if kind == "default":
        wanted, factor = 1 / 50000.0 ** (torch.arange(0, 128 * share, 2) / (128 * share)), 1.0
    else:
        wanted, factor = utils.ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)
    if kind == "dynamic":
        scaling |= {"seq_len": length, "max_position_embeddings": 2048}
    found, found_factor = headway.rope_frequencies(128, scaling=scaling)
    np.testing.assert_allclose(found, wanted.double().numpy(), rtol=2e-5)
    assert found_factor == pytest.approx(factor, rel=1e-7)
    x = np.random.default_rng(0).standard_normal((3, 128))
    np.testing.assert_allclose(
        headway.rope(x, [0, 5, 900], scaling=scaling), rotated(x, [0, 5, 900], found, found_factor), atol=1e-12
    )


def test_the_gradient_of_rope_is_the_rotation_back():
    rng = np.random.default_rng(0)
    x, grad = rng.standard_normal((2, 4, 6, 10))
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    found = headway.rope_backward(grad, range(6), scaling=scaling)
    step = rng.standard_normal(x.shape)
    change = headway.rope(x + step, range(6), scaling=scaling) - headway.rope(x, range(6), scaling=scaling)
    assert np.vdot(found, step) == pytest.approx(np.vdot(grad, change))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dims": 3}, ValueError, "expected dims even and at most the head_dim 8, found 3"),
        ({"dims": 10}, ValueError, "found 10"),
        ({"base": 0}, ValueError, "expected a finite base above 0, found 0"),
        ({"base": "x"}, TypeError, "base is 'x', expected a number"),
        ({"scaling": {"rope_type": "new"}}, ValueError, "rope_type is 'new', expected 'default', 'linear'"),
        ({"scaling": {"rope_type": "linear"}}, ValueError, "linear scaling needs the key 'factor', found none"),
        ({"scaling": {"type": "linear", "factor": float("nan")}}, ValueError, "expected a finite factor"),
        ({"scaling": {"type": "dynamic", "factor": 2.0}}, ValueError, "depends on the length of the text"),
        ({"scaling": {"type": "linear", "factor": 2.0, "fector": 1}}, ValueError, "has the key 'fector'"),
        ({"scaling": "linear"}, TypeError, "scaling is a str, expected a dict"),
        ({"positions": [0, 1]}, ValueError, r"positions has shape \(2,\), expected \(3,\)"),
        ({"positions": [0.0, 1.0, 2.0]}, TypeError, "positions has type f64, expected integers"),
        ({"x": np.zeros((3, 8), int)}, TypeError, "x has type i64"),
        ({"x": [1.0]}, TypeError, "x must be an array"),
    ],
)
def test_errors_of_rope(arguments, error, text):
    arguments = {"x": np.zeros((3, 8)), "positions": [0, 1, 2], **arguments}
    with pytest.raises(error, match=f"^rope: .*{text}"):
        headway.rope(arguments.pop("x"), arguments.pop("positions"), **arguments)


# ---- KVCache ----


def filled(rng, lengths, dtype="float32", **settings):
    """A cache with sequences of these lengths, and each one's keys and values (1, Hkv, S, D)."""
    settings = {"pages": 200, "page_size": 4, "kv_heads": 2, "head_dim": 8, "dtype": dtype, **settings}
    cache = headway.KVCache(**settings)
    rows = []
    for length in lengths:
        key, value = random(rng, (1, 2, length, 8), dtype), random(rng, (1, 2, length, 8), dtype)
        cache.append(cache.add(), key, value)
        rows.append((key, value))
    return cache, rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_attends_as_attention_does(dtype):
    rng = np.random.default_rng(0)
    cache, rows = filled(rng, [30, 1, 17], dtype)
    query = random(rng, (3, 4, 2, 8), dtype)
    out, lse = cache.attend([0, 1, 2], query, softcap=2.0, return_lse=True)
    for b, (key, value) in enumerate(rows):
        alone, alone_lse = headway.attention(
            query[b : b + 1], key, value, causal="bottom_right", softcap=2.0, return_lse=True
        )
        assert np.array_equal(out[b : b + 1], alone) and np.array_equal(lse[b : b + 1], alone_lse)
    packed = query.swapaxes(1, 2).reshape(6, 4, 8)
    found = cache.attend([0, 1, 2], packed, cu_seqlens=[0, 2, 4, 6], softcap=2.0)
    assert np.array_equal(found.reshape(3, 2, 4, 8).swapaxes(1, 2), out)
    assert cache.config["dtype"] == dtype


def test_forks_truncation_and_removal():
    rng = np.random.default_rng(1)
    cache, [(key, value)] = filled(rng, [10])
    other = cache.fork(0)
    assert other == 1 and cache.free_pages == 200 - 3
    more = random(rng, (2, 1, 2, 5, 8))
    cache.append([other], *more)
    assert (cache.length(0), cache.length(other)) == (10, 15)
    query = random(rng, (1, 4, 1, 8))
    joined = [np.concatenate(pair, axis=2) for pair in zip((key, value), more)]
    assert np.array_equal(cache.attend(other, query), headway.attention(query, *joined))
    assert np.array_equal(cache.attend(0, query), headway.attention(query, key, value))
    cache.truncate(other, 12)
    cut = [rows[:, :, :12] for rows in joined]
    assert np.array_equal(cache.attend(other, query), headway.attention(query, *cut))
    cache.remove(0)
    cache.remove(other)
    assert cache.free_pages == 200 and cache.ids == []


@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_window_keeps_what_queries_can_see(first, page_size):
    rng = np.random.default_rng(2)
    key, value = random(rng, (2, 1, 2, 90, 8))
    cache = headway.KVCache(40 // page_size, page_size, 2, 8, window=(9, 0), first=first)
    id = cache.add()
    at = 0
    while at < 90:
        count = min(int(rng.integers(1, 6)), 90 - at)
        at += count
        cache.append(id, key[:, :, at - count : at], value[:, :, at - count : at])
        query = random(rng, (1, 4, count, 8))
        place, j = np.arange(at - count, at)[:, None], np.arange(at)
        seen = (j <= place) & ((j >= place - 9) | (j < first))
        answer = oracle.attention(query, key[:, :, :at], value[:, :, :at], mask=seen)
        np.testing.assert_allclose(cache.attend(id, query), answer.out, atol=1e-5)
        if first == 0:
            same = headway.attention(query, key[:, :, :at], value[:, :, :at], causal="bottom_right", window=(9, 0))
            assert np.array_equal(cache.attend(id, query), same)
    assert cache.length(id) == 90 and cache.free_pages > 0
    with pytest.raises(ValueError, match=r"^KVCache.truncate: sequence 0 cannot go back to length 40"):
        cache.truncate(id, 40)


def test_slack_is_what_truncate_may_take_back():
    rng = np.random.default_rng(3)
    key, value = random(rng, (2, 1, 2, 60, 8))
    cache = headway.KVCache(60, 1, 2, 8, window=5, slack=10)
    id = cache.add()
    for s in range(50):
        cache.append(id, key[:, :, s : s + 1], value[:, :, s : s + 1])
    cache.truncate(id, 39)
    cache.append(id, key[:, :, 39:41], value[:, :, 39:41])
    query = random(rng, (1, 2, 2, 8))
    same = headway.attention(query, key[:, :, :41], value[:, :, :41], causal="bottom_right", window=(5, 0))
    assert np.array_equal(cache.attend(id, query), same)


@pytest.mark.parametrize("rope", [{}, {"base": 500.0, "dims": 4, "interleaved": True}, HUGGING_FACE["llama3"]])
def test_rope_in_a_cache_is_rope_before_it(rope):
    rng = np.random.default_rng(4)
    if "factor" in rope:
        rope = {"rope_type": "llama3", "rope_theta": 500.0, **rope}
        arguments = {"scaling": rope}
    else:
        arguments = rope
    key, value, query = random(rng, (3, 1, 2, 12, 8))
    cache = headway.KVCache(10, 4, 2, 8, rope=rope)
    id = cache.add()
    cache.append(id, key[:, :, :5], value[:, :, :5])
    cache.append(id, key[:, :, 5:], value[:, :, 5:])
    turned = headway.rope(key, range(12), **arguments)
    assert np.array_equal(cache.read(id)[0], turned[0])
    answer = headway.attention(
        headway.rope(query[:, :, :3], range(9, 12), **arguments), turned, value, causal="bottom_right"
    )
    assert np.array_equal(cache.attend(id, query[:, :, :3]), answer)


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_eight_bits_are_within_their_bound(quantize, dtype):
    rng = np.random.default_rng(5)
    cache, [(key, value)] = filled(rng, [40], dtype, quantize=quantize)
    read = cache.read(0)
    for rows, back in zip((key, value), read):
        largest = np.abs(rows.astype(float)).max(-1, keepdims=True)
        step = (
            largest / 254 if quantize == "int8" else np.maximum(np.abs(rows.astype(float)) / 16, largest / 448 / 1024)
        )
        assert back.dtype == np.float32 and (np.abs(back - rows[0].astype(float)) <= step[0] * 1.0001).all()
    query = random(rng, (1, 4, 3, 8), dtype)
    out = cache.attend(0, query)
    exact = oracle.attention(query.astype(float), *(rows[None] for rows in read), causal="bottom_right")
    assert out.dtype == query.dtype
    np.testing.assert_allclose(out.astype(float), exact.out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    one_by_one = cache.add()
    for s in range(40):
        cache.append(one_by_one, key[:, :, s : s + 1], value[:, :, s : s + 1])
    assert np.array_equal(cache.attend(one_by_one, query), out)


def test_values_inside_of_keys():
    rng = np.random.default_rng(6)
    key, query = random(rng, (1, 1, 9, 12)), random(rng, (1, 4, 2, 12))
    cache = headway.KVCache(10, 4, 1, 12, value_in_key=8)
    id = cache.add()
    cache.append(id, key)
    out = cache.attend(id, query)
    assert np.array_equal(out, headway.attention(query, key, key[..., :8], causal="bottom_right"))


def test_a_cache_comes_back_from_its_file(tmp_path):
    rng = np.random.default_rng(7)
    cache, _ = filled(rng, [10, 3], quantize="int8", window=(50, 0), first=2, rope={"base": 7.0})
    cache.fork(0)
    cache.save(tmp_path / "cache.safetensors")
    loaded = headway.KVCache.load(tmp_path / "cache.safetensors")
    query = random(rng, (3, 4, 1, 8))
    assert loaded.ids == [0, 1, 2] and loaded.free_pages == cache.free_pages and loaded.config == cache.config
    assert np.array_equal(loaded.attend([0, 1, 2], query), cache.attend([0, 1, 2], query))
    with pytest.raises(FileExistsError, match="^KVCache.save"):
        cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="^KVCache.save: .*cache.npz: expected a file name that ends in .safetensors"):
        cache.save(tmp_path / "cache.npz")


def test_torch_tensors_in_a_cache():
    torch = pytest.importorskip("torch")
    cache = headway.KVCache(10, 4, 2, 8, dtype=torch.bfloat16)
    key, value, query = torch.randn(3, 1, 2, 5, 8).bfloat16()
    id = cache.add()
    cache.append(torch.tensor([id]), key, value)
    out = cache.attend([id], query)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
    assert torch.equal(out, headway.attention(query, key, value, causal=True))


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        (lambda c, row: c.append([0, 1], *row), headway.OutOfPages, "2 pages of 4 tokens are needed, 1 of 2 are free"),
        (lambda c, row: c.append([0, 7], *row), KeyError, "KVCache.append: there is no sequence 7"),
        (lambda c, row: c.append([0, 0], *row), ValueError, "expected each sequence once, found 0 twice"),
        (lambda c, row: c.append(["a", "b"], *row), TypeError, "ids"),
        (lambda c, row: c.append([0], *row), ValueError, r"key has shape \(2, 2, 1, 8\), expected \(1, 2, 1, 8\)"),
        (
            lambda c, row: c.append([0, 1], row[0].astype(float), row[1]),
            TypeError,
            "key has type f64, the cache has f32",
        ),
        (lambda c, row: c.append([0, 1], row[0]), ValueError, "expected a value, found none"),
        (lambda c, row: c.append([0], row[0], row[1], cu_seqlens=[0, 1]), ValueError, "with cu_seqlens"),
        (lambda c, row: c.attend([0], row[0]), ValueError, "query has batch 2, expected 1"),
        (lambda c, row: c.attend([5], row[0][:1]), KeyError, "KVCache.attend: there is no sequence 5"),
        (lambda c, row: c.attend([0], row[0][:1], mask=True), TypeError, "unexpected keyword argument 'mask'"),
        (lambda c, row: c.attend([0], row[0][:1], return_weights=True), ValueError, "weights"),
        (lambda c, row: c.attend([0], row[0][:1, :, :, :7]), ValueError, "query has head_dim 7, the cache has 8"),
        (lambda c, row: c.truncate(0, 9), ValueError, "expected a length of 0 to 4 for sequence 0, found 9"),
        (lambda c, row: c.truncate(0, 1.5), TypeError, "length is 1.5, expected an integer"),
        (lambda c, row: c.fork(9), KeyError, "KVCache.fork: there is no sequence 9"),
        (lambda c, row: c.remove(-1), KeyError, "KVCache.remove: there is no sequence -1"),
        (lambda c, row: c.length(2**70), KeyError, "there is no sequence"),
        (lambda c, row: c.read(0, 3, 2), ValueError, "expected 0 <= begin <= end <= 4"),
    ],
)
def test_errors_leave_a_cache_as_it_was(action, error, text):
    rng = np.random.default_rng(8)
    cache, [(key, _), _] = filled(rng, [4, 0], pages=2)
    row = random(rng, (2, 2, 2, 1, 8))
    with pytest.raises(error, match=text):
        action(cache, row)
    assert cache.ids == [0, 1] and (cache.length(0), cache.length(1), cache.free_pages) == (4, 0, 1)
    assert np.array_equal(cache.read(0)[0], key[0])


def test_out_of_pages_is_a_memory_error():
    assert issubclass(headway.OutOfPages, MemoryError)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"device": "cuda:x"}, ValueError, "device is 'cuda:x', expected None, 'cpu', 'cuda'"),
        ({"device": "tpu"}, ValueError, "device is 'tpu', expected None, 'cpu', 'cuda'"),
        ({"dtype": "int8"}, TypeError, "dtype is 'int8', expected 'float32'"),
        ({"quantize": "int4"}, ValueError, "quantize is 'int4', expected None, 'int8' or 'fp8'"),
        ({"quantize": "int8", "dtype": "float64"}, TypeError, "quantised pages take f32, bf16 or f16, found f64"),
        ({"window": (-1, 0)}, ValueError, "expected a window of 0 or more"),
        ({"window": "8"}, TypeError, "window is '8'"),
        ({"first": 3}, ValueError, "first 3 and slack 0 need a window"),
        ({"page_size": 0}, ValueError, "expected page_size of 1 or more, found 0"),
        ({"page_size": 1.0}, TypeError, "page_size is 1.0, expected an integer"),
        ({"rope": {"rope_type": "dynamic", "factor": 2.0}}, ValueError, "dynamic rope scaling depends on the length"),
        ({"rope": {"dims": 5}}, ValueError, "expected dims even"),
        ({"rope": True}, TypeError, "rope is a bool, expected a dict"),
        ({"value_in_key": 99}, ValueError, "expected value_in_key of 0 to the head_dim 8, found 99"),
        ({"value_in_key": 4, "rope": {}}, ValueError, "rotate keys before append"),
    ],
)
def test_settings_that_cannot_be(settings, error, text):
    with pytest.raises(error, match=f"^KVCache: .*{text}"):
        headway.KVCache(**{"pages": 4, "page_size": 4, "kv_heads": 2, "head_dim": 8, **settings})


@pytest.mark.skipif("cuda" in headway.engines(), reason="there is a GPU")
def test_a_cache_on_a_gpu_says_why_there_is_none():
    with pytest.raises(NotImplementedError, match="^KVCache: the pages are to be on cuda:1, and the cuda engine"):
        headway.KVCache(4, 4, 2, 8, device="cuda:1")


def test_too_many_pages_for_memory_is_a_memory_error_and_the_next_call_works():
    with pytest.raises(MemoryError, match="^KVCache: could not allocate"):
        headway.KVCache(2**30, 2**16, 16, 128)
    headway.KVCache(1, 1, 1, 1)


def test_threads_share_a_cache():
    rng = np.random.default_rng(9)
    cache, rows = filled(rng, [20, 20, 20])
    query = random(rng, (1, 4, 1, 8))
    wrong = []

    def work(id, key, value):
        expected = headway.attention(query, key, value)
        for _ in range(50):
            cache.remove(cache.fork(id))
            if not np.array_equal(cache.attend(id, query), expected):
                wrong.append(id)

    threads = [threading.Thread(target=work, args=(id, *pair)) for id, pair in enumerate(rows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_rope_in_torch_has_gradients_of_every_order():
    torch = pytest.importorskip("torch")
    import headway.torch

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

    def turn(x):
        return headway.torch.rope(x, torch.arange(5), interleaved=True, scaling=scaling)

    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(turn, x) and torch.autograd.gradgradcheck(turn, x)
    assert np.array_equal(
        turn(x).detach(), headway.rope(x.detach().numpy(), range(5), interleaved=True, scaling=scaling)
    )
    with pytest.raises(TypeError, match="^rope: x is a list, expected a torch.Tensor"):
        headway.torch.rope([1.0], [0])
