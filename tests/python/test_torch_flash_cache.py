"""flash_attn_with_kvcache against a plain recomputation in torch, and paged keys in flash_attn_varlen_func."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from headway.torch import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402
from test_torch_flash import as_expected, expected  # noqa: E402

OPTIONS = [
    {"causal": True},
    {},
    {"causal": True, "window_size": (3, -1)},
    {"window_size": (4, 2), "softcap": 1.5},
    {"causal": True, "softmax_scale": 0.2, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    {"causal": True, "alibi_slopes": torch.arange(1.0, 13.0).reshape(3, 4) / 16},
]


def turned(x, cos, sin, positions, interleaved):
    """x (S, H, D), positions (S,)."""
    c, s = cos[positions][:, None].double(), sin[positions][:, None].double()
    x, dims = x.double().clone(), 2 * cos.shape[1]
    a, b = (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (slice(0, dims // 2), slice(dims // 2, dims))
    first, second = x[..., a].clone(), x[..., b].clone()
    x[..., a], x[..., b] = first * c - second * s, second * c + first * s
    return x


def check(q, rows, lengths, k, v, out, lse, options, rotary=None, leftpad=None):
    """rows: each sequence's keys and values before the call, as (length, Hkv, D) pairs."""
    causal = options.get("causal", False)
    for b, (key, value) in enumerate(rows):
        query, new = q[b].double(), [] if k is None else [k[b].double()]
        if rotary is not None:
            cos, sin, interleaved = rotary
            new = [turned(k[b], cos, sin, lengths[b] + torch.arange(k.shape[1]), interleaved)]
            local = causal or tuple(options.get("window_size", (-1, -1))) != (-1, -1)
            steps = torch.arange(q.shape[1]) if local else torch.zeros(q.shape[1], dtype=torch.int64)
            query = turned(q[b], cos, sin, lengths[b] + steps, interleaved)
        keys = torch.cat([key.double(), *new])
        values = torch.cat([value.double(), *([] if v is None else [v[b].double()])])
        begin = 0 if leftpad is None else leftpad[b]
        given = dict(options)
        if "alibi_slopes" in given and given["alibi_slopes"].dim() == 2:
            given["alibi_slopes"] = given["alibi_slopes"][b]
        right, right_lse = expected(query[None], keys[None, begin:], values[None, begin:], **as_expected(given))
        torch.testing.assert_close(out[b].double(), right[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(lse[b].double(), right_lse[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("new", [0, 1, 5])
def test_a_contiguous_cache(options, new):
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 4, 20, 2, 8)
    q, lengths, places = torch.randn(3, max(new, 2), 4, 8), torch.tensor([7, 2, 15], dtype=torch.int32), [3, 0, 1]
    k, v = (torch.randn(3, new, 2, 8) for _ in range(2)) if new else (None, None)
    rows = [(k_cache[at, :n].clone(), v_cache[at, :n].clone()) for at, n in zip(places, lengths)]
    before = k_cache.clone()
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=torch.tensor(places, dtype=torch.int32),
        return_softmax_lse=True, **options,
    )  # fmt: skip
    check(q, rows, lengths, k, v, out, lse, options)
    for b, at in enumerate(places):
        if new:
            assert torch.equal(k_cache[at, lengths[b] : lengths[b] + new], k[b])
            assert torch.equal(v_cache[at, lengths[b] : lengths[b] + new], v[b])
            before[at, lengths[b] : lengths[b] + new] = k[b]
    assert torch.equal(k_cache, before)  # and nothing else has changed


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dims", [8, 4])
def test_pages_and_rotation(options, interleaved, dims):
    torch.manual_seed(1)
    k_cache, v_cache = torch.randn(2, 12, 4, 2, 8)
    table = torch.tensor([[5, 0, 9], [1, 2, 3], [11, 10, 8]], dtype=torch.int32)
    lengths = torch.tensor([7, 0, 3], dtype=torch.int32)
    angles = torch.rand(30, dims // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    q, k, v = torch.randn(3, 3, 4, 8), torch.randn(3, 3, 2, 8), torch.randn(3, 3, 2, 8)
    rows = [
        tuple(c[table[b].long()].flatten(0, 1)[:n].clone() for c in (k_cache, v_cache)) for b, n in enumerate(lengths)
    ]
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, block_table=table,
        rotary_interleaved=interleaved, return_softmax_lse=True, **options,
    )  # fmt: skip
    check(q, rows, lengths, k, v, out, lse, options, rotary=(cos, sin, interleaved))


def test_a_left_padded_cache_begins_at_its_first_key():
    torch.manual_seed(2)
    k_cache, v_cache, q = torch.randn(2, 10, 2, 8), torch.randn(2, 10, 2, 8), torch.randn(2, 2, 4, 8)
    pad, options = torch.tensor([0, 4], dtype=torch.int32), {"causal": True}
    rows = [(k_cache[b, :9], v_cache[b, :9]) for b in range(2)]
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=9, cache_leftpad=pad, return_softmax_lse=True, **options
    )
    check(q, rows, [9, 9], None, None, out, lse, options, leftpad=pad)


def test_half_types_and_the_whole_length():
    torch.manual_seed(3)
    k_cache, v_cache, q = (torch.randn(2, 9, heads, 8).bfloat16() for heads in (2, 2, 4))
    out = flash_attn_with_kvcache(q[:, :1], k_cache, v_cache)
    right, _ = expected(q[:, :1], k_cache, v_cache)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), right, rtol=0, atol=2e-2)


def test_packed_queries_over_pages():
    torch.manual_seed(4)
    pages = torch.randn(2, 8, 4, 2, 8)
    table = torch.tensor([[5, 0], [1, 2]], dtype=torch.int32)
    q = torch.randn(6, 4, 8)
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 6], [0, 7, 11]))
    out, lse, _ = flash_attn_varlen_func(
        q, *pages, starts_q, starts_k, 4, 7, causal=True, block_table=table, return_attn_probs=True
    )
    for b, length in enumerate((7, 4)):
        rows = slice(starts_q[b], starts_q[b + 1])
        key, value = (x[table[b].long()].flatten(0, 1)[None, :length] for x in pages)
        right, right_lse = expected(q[None, rows], key, value, causal=True)
        torch.testing.assert_close(out[rows].double(), right[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(lse[:, rows].double(), right_lse[0], rtol=0, atol=1e-5)


def test_errors_leave_the_cache_as_it_was():
    cache, values = torch.zeros(2, 2, 8, 2, 8)
    q, k = torch.zeros(2, 1, 4, 8), torch.ones(2, 3, 2, 8)
    cos = torch.ones(4, 4)
    new, turn = {"k": k, "v": k, "cache_seqlens": 0}, {"rotary_cos": cos, "rotary_sin": cos}
    for text, error, arguments in [
        (r"cache_seqlens\[0\] is 6, expected 0 to 5", ValueError, {"k": k, "v": k, "cache_seqlens": 6}),
        ("expected both k and v", ValueError, {"k": k, "cache_seqlens": 0}),
        (r"k has shape \(2, 3, 1, 8\)", ValueError, {"k": k[:, :, :1], "v": k, "cache_seqlens": 0}),
        ("k has type torch.float64", TypeError, {"k": k.double(), "v": k, "cache_seqlens": 0}),
        ("need k and v", ValueError, turn),
        ("expected both rotary_cos", ValueError, new | {"rotary_cos": cos}),
        ("position 6, rotary_cos has 4", ValueError, new | turn | {"cache_seqlens": 4}),
        ("same place", ValueError, new | {"cache_batch_idx": torch.tensor([1, 1])}),
        ("expected pages from 0 to 1", ValueError, new | {"cache_batch_idx": torch.tensor([1, 2])}),
        (r"block_table\[1, 0\] is 9", ValueError, {"block_table": torch.tensor([[0], [9]]), "cache_seqlens": 3}),
        ("found both", ValueError, {"block_table": torch.tensor([[0], [1]]), "cache_batch_idx": torch.tensor([0, 1])}),
        (r"cache_seqlens\[0\] is 99", ValueError, {"cache_seqlens": 99}),
        # What attention itself refuses, and the rotation of the queries.
        (r"alibi_slopes has shape \(5,\), expected \(4,\)", ValueError, new | {"alibi_slopes": torch.ones(5)}),
        ("scale is nan", ValueError, new | {"softmax_scale": float("nan")}),
        ("softcap is -1", ValueError, new | {"softcap": -1.0}),
        ("window_size left is -3", ValueError, new | {"window_size": (-3, 0)}),
        ("q has 3 heads, expected a multiple of the 2", ValueError, new | {"q": q[:, :, :3]}),
        ("k_cache has type f32, expected the q's f64", TypeError, new | {"q": q.double()}),
        ("q is at position 8, rotary_cos has 4", ValueError, new | turn | {"q": q.expand(2, 9, 4, 8), "causal": True}),
        ("v is on meta, v_cache is on cpu", ValueError, new | {"v": k.to("meta")}),
    ]:  # fmt: skip
        with pytest.raises(error, match=f"^flash_attn_with_kvcache: .*{text}"):
            flash_attn_with_kvcache(**{"q": q, "k_cache": cache, "v_cache": values} | arguments)
        assert not cache.any() and not values.any()
