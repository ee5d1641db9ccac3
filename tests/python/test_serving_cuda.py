"""Serving with CUDA tensors: pages, RoPE, the KV cache, flash_attn_with_kvcache. Skipped without a GPU."""

import pytest

from torch_support import no_cuda

pytestmark = pytest.mark.skipif(no_cuda() is not None, reason=str(no_cuda()))
torch = pytest.importorskip("torch", reason="torch is not installed")

import headway  # noqa: E402
import headway.torch as ht  # noqa: E402
import oracle  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


def in_pages(rows, page_size):
    """Rows (B, S, Hkv, D) in pages of a random order, NaN between them, and the table."""
    batch, length, heads, width = rows.shape
    count = -(-length // page_size)
    order = torch.randperm(batch * count + 3, device="cuda")
    pages = torch.full((len(order), page_size, heads, width), float("nan"), device="cuda").to(rows.dtype)
    table = order[: batch * count].reshape(batch, count).int()
    for b in range(batch):
        for n in range(count):
            part = rows[b, n * page_size : (n + 1) * page_size]
            pages[table[b, n].long(), : len(part)] = part
    return pages, table


def as_numpy(x):
    return x.double().cpu().numpy()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("queries", [1, 33])
def test_pages_give_what_attention_gives(dtype, page_size, queries):
    torch.manual_seed(page_size)
    lengths = [300, 40]
    key, value, query = (
        draw(2, 300, 2, 64, dtype=dtype),
        draw(2, 300, 2, 64, dtype=dtype),
        draw(2, 4, queries, 64, dtype=dtype),
    )
    torch.manual_seed(7)
    key_pages, table = in_pages(key, page_size)
    torch.manual_seed(7)
    value_pages, _ = in_pages(value, page_size)
    for place in ("cuda", "cpu"):
        counts = torch.tensor(lengths, device=place)
        out, lse = headway.attention_paged(query, key_pages, value_pages, table.to(place), counts, return_lse=True)
        assert out.device == query.device and out.dtype == dtype and lse.shape == (2, 4, queries)
        for b, length in enumerate(lengths):
            rows = [as_numpy(x[b : b + 1, :length].transpose(1, 2)) for x in (key, value)]
            answer = oracle.attention(as_numpy(query[b : b + 1]), *rows, causal="bottom_right")
            torch.testing.assert_close(
                out[b : b + 1].double().cpu(),
                torch.from_numpy(answer.out),
                rtol=TOLERANCE[dtype],
                atol=TOLERANCE[dtype],
            )
            alone = headway.attention(
                query[b : b + 1],
                key[b : b + 1, :length].transpose(1, 2),
                value[b : b + 1, :length].transpose(1, 2),
                causal="bottom_right",
                batch_invariant=True,
            )
            one = slice(b, b + 1)
            paged = headway.attention_paged(
                query[one], key_pages, value_pages, table[one], counts[one].cuda(), batch_invariant=True
            )
            assert torch.equal(alone, paged)


def test_rope_and_its_gradient():
    x = draw(2, 3, 5, 16)
    positions = torch.arange(5, device="cuda") + 1000
    turned = headway.rope(x, positions)
    expected = headway.rope(x.cpu().numpy(), positions.cpu().numpy())
    torch.testing.assert_close(turned.cpu(), torch.from_numpy(expected))
    torch.testing.assert_close(headway.rope_backward(turned, positions), x, rtol=1e-5, atol=1e-5)
    leaf = x.clone().requires_grad_()
    ht.rope(leaf, positions).square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_a_cache_in_a_gpus_memory(tmp_path, quantize):
    cache = headway.KVCache(64, 16, 2, 64, dtype="bfloat16", device="cuda", quantize=quantize)
    assert cache.config["device"] == "cuda:0"
    a, b = cache.add(), cache.add()
    key, value = draw(33, 2, 64, dtype=torch.bfloat16), draw(33, 2, 64, dtype=torch.bfloat16)
    cache.append([a, b], key, value, cu_seqlens=[0, 30, 33])
    cache.append([a, b], draw(2, 2, 1, 64, dtype=torch.bfloat16), draw(2, 2, 1, 64, dtype=torch.bfloat16))
    c = cache.fork(a)
    cache.truncate(c, 20)
    query = draw(3, 8, 1, 64, dtype=torch.bfloat16)

    def check(cache):
        out = cache.attend([a, b, c], query)
        assert out.is_cuda
        for n, id in enumerate((a, b, c)):
            rows = [torch.from_numpy(x)[None].double().numpy() for x in cache.read(id)]
            answer = oracle.attention(as_numpy(query[n : n + 1]), *rows)
            torch.testing.assert_close(
                out[n : n + 1].double().cpu(), torch.from_numpy(answer.out), rtol=3e-2, atol=3e-2
            )

    check(cache)
    cache.save(tmp_path / "cache.safetensors")
    check(headway.KVCache.load(tmp_path / "cache.safetensors", device="cuda"))
    with pytest.raises(ValueError, match="key is on cpu, the cache is on cuda:0"):
        cache.append(a, key[:1].cpu()[None].transpose(1, 2), value[:1].cpu()[None].transpose(1, 2))


def test_flash_attn_with_kvcache_in_a_gpus_memory():
    lengths = torch.tensor([20, 5], dtype=torch.int32, device="cuda")
    k_cache, v_cache = draw(2, 64, 2, 64, dtype=torch.bfloat16), draw(2, 64, 2, 64, dtype=torch.bfloat16)
    q, k, v = draw(2, 1, 4, 64, dtype=torch.bfloat16), *draw(2, 2, 1, 2, 64, dtype=torch.bfloat16)
    expected = ht.flash_attn_with_kvcache(
        q.cpu().float(), k_cache.cpu().float(), v_cache.cpu().float(), k.cpu().float(), v.cpu().float(),
        cache_seqlens=lengths.cpu(), causal=True,
    )  # fmt: skip
    out = ht.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    assert torch.equal(k_cache[0, 20], k[0, 0]) and torch.equal(v_cache[1, 5], v[1, 0])
    torch.testing.assert_close(out.float().cpu(), expected, rtol=3e-2, atol=3e-2)
    again = ht.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths + 1, causal=True)
    assert torch.equal(out, again)
