"""Arrays on a CUDA device: computed there, on their library's stream, and returned there. Skipped without one."""

import dataclasses
import types
import urllib.request

import numpy as np
import pytest

import headway
import oracle
from cases import DTYPES, assert_close, random_case, without_batch_and_heads
from torch_support import no_cuda

pytestmark = pytest.mark.skipif(no_cuda() is not None, reason=str(no_cuda()))
torch = pytest.importorskip("torch", reason="torch is not installed")

SEEDS = range(40)


def on_gpu(value):
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(np.ascontiguousarray(value)).cuda()


def on_host(tensor):
    assert tensor.is_cuda
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def as_float64(case):
    return [np.asarray(array).astype(np.float64) for array in case.inputs]


def gpu_case(seed, dtype):
    """A random call, its inputs on the GPU; lengths now there and now on the host."""
    case = random_case(seed, dtype)
    lengths = ("valid_lens", "query_lens")
    options = {n: v if n in lengths and seed % 2 else on_gpu(v) for n, v in case.options.items()}
    return case, [on_gpu(x) for x in case.inputs], options


# ---- Results ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option_with_every_other(dtype):
    for seed in SEEDS:
        case, inputs, options = gpu_case(seed, dtype)
        expected = oracle.attention(*as_float64(case), **case.options)
        out, weights, lse = headway.attention(*inputs, **options, return_weights=True, return_lse=True)
        rank = case.query.ndim
        assert out.dtype == weights.dtype == inputs[0].dtype and out.device == inputs[0].device
        keep = 1.0 / (1.0 - case.options.get("dropout", 0)) if case.options.get("dropout", 0) < 1 else 1.0
        assert_close(on_host(out), without_batch_and_heads(expected.out, rank), dtype, keep)
        assert_close(on_host(weights), without_batch_and_heads(expected.weights, rank), dtype)
        lse_type = "float64" if dtype == "float64" else "float32"
        assert_close(on_host(lse), without_batch_and_heads(expected.lse, rank), lse_type)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_with_every_option(dtype):
    for seed in SEEDS:
        case, inputs, options = gpu_case(seed, dtype)
        out, lse = headway.attention(*inputs, **options, return_lse=True)
        grad_out = torch.randn(out.shape, dtype=torch.float32).to(out.dtype).cuda()
        found = headway.attention_backward(grad_out, *inputs, out, lse, **options)
        expected = oracle.gradients(on_host(grad_out).astype(np.float64), *as_float64(case), **case.options)
        for name in ("query", "key", "value", "bias", "sinks"):
            gradient = getattr(found, name)
            if name not in expected:
                assert gradient is None
                continue
            assert_close(on_host(gradient), expected[name], dtype, 4.0)


@pytest.mark.parametrize("stage", ["scaled", "capped", "biased", "weights"])
def test_scores_after_every_stage(stage):
    for seed in SEEDS:
        case, inputs, options = gpu_case(seed, "float32")
        found = headway.attention_scores(*inputs[:2], stage=stage, **options)
        expected = oracle.attention(*as_float64(case), **case.options).stages[stage]
        assert_close(on_host(found), without_batch_and_heads(expected, case.query.ndim), "float32")


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_packed_sequences_with_bounds_on_either_side(place):
    rows = torch.randn(9, 4, 8, dtype=torch.float64)
    starts = torch.tensor([0, 4, 4, 9])
    expected, expected_lse = headway.attention_varlen(rows, rows, rows, starts, starts, causal=True, return_lse=True)
    there, bounds = rows.cuda(), starts.to(place)
    out, lse = headway.attention_varlen(there, there, there, bounds, bounds, causal=True, return_lse=True)
    torch.testing.assert_close(out.cpu(), expected)
    found = headway.attention_varlen_backward(there, *3 * [there], out, lse, bounds, bounds, causal=True)
    wanted = headway.attention_varlen_backward(rows, *3 * [rows], expected, expected_lse, starts, starts, causal=True)
    for one, other in zip(found[:3], wanted[:3]):
        torch.testing.assert_close(one.cpu(), other)


LARGE = [
    (torch.float16, 64, 2000.0),
    (torch.float16, 128, 900.0),
    (torch.bfloat16, 64, 1e6),
    (torch.bfloat16, 128, 24576.0),
    (torch.bfloat16, 256, 3e4),
    (torch.float32, 64, 1e18),
]


@pytest.mark.parametrize("dtype, head_dim, size", LARGE)
def test_equal_scores_of_any_finite_size_give_the_mean(dtype, head_dim, size):
    query = torch.full((1, 1, 64, head_dim), size, device="cuda", dtype=dtype)
    key = torch.full((1, 1, 128, head_dim), size, device="cuda", dtype=dtype)
    out, lse = headway.attention(query, key, torch.ones_like(key), return_lse=True)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=0)
    expected = (query[0, 0, 0].double() @ key[0, 0, 0].double()).item() / head_dim**0.5 + np.log(128)
    assert abs(lse.double() - expected).max().item() <= abs(expected) * 2.0**-20
    grads = headway.attention_backward(torch.ones_like(out), query, key, torch.ones_like(key), out, lse)
    torch.testing.assert_close(grads.value, torch.full_like(key, 64 / 128), rtol=2**-7, atol=0)
    assert torch.isfinite(grads.query).all() and torch.isfinite(grads.key).all()


def test_strided_input_is_read_where_it_lies_and_only_the_result_is_allocated():
    joined = torch.randn(2, 128, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    query, key, value = joined.permute(2, 0, 3, 1, 4)
    expected = headway.attention(*(x.contiguous() for x in (query, key, value)))
    out = torch.empty(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    returned = headway.attention(query, key, value, out=out.transpose(1, 2))
    assert torch.cuda.max_memory_allocated() == before
    assert torch.equal(returned, expected) and torch.equal(out.transpose(1, 2), expected)
    headway.attention(query, key, value)
    assert torch.cuda.max_memory_allocated() - before == out.numel() * out.element_size()
    assert headway.attention(*3 * [joined[:0, :, 0].transpose(1, 2)]).shape == (0, 4, 128, 64)


def test_gradients_are_written_where_they_are_wanted():
    x = torch.randn(2, 3, 5, 8, device="cuda", dtype=torch.float64)
    out, lse = headway.attention(x, x, x, return_lse=True)
    expected = headway.attention_backward(x, x, x, x, out, lse)
    places = torch.empty(2, 5, 3, 3, 8, device="cuda", dtype=torch.float64).permute(2, 0, 3, 1, 4)
    found = headway.attention_backward(x, x, x, x, out, lse, gradients=tuple(places))
    for one, place, other in zip(found, places, expected):
        assert one.data_ptr() == place.data_ptr() and torch.equal(one, other)


def test_a_thousand_repeats_give_the_same_bits():
    q, k, v = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    out, lse = headway.attention(q, k, v, causal=True, return_lse=True)
    grads = headway.attention_backward(out, q, k, v, out, lse, causal=True)
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        again, statistics = headway.attention(q, k, v, causal=True, return_lse=True)
        repeated = headway.attention_backward(again, q, k, v, again, statistics, causal=True)
        for one, other in zip((again, statistics, *repeated[:3]), (out, lse, *grads[:3])):
            different += (one != other).sum()
    assert different.item() == 0


# ---- Streams and libraries ----


def test_work_follows_what_the_current_stream_has_queued():
    x = torch.zeros(4, 8, 512, 64, device="cuda", dtype=torch.float16)
    filled = torch.randn_like(x)
    expected = headway.attention(filled, filled, filled)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(filled)
        out = headway.attention(x, x, x)
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "the call waited for the device"
    done.synchronize()
    assert torch.equal(out, expected)


asked_streams = []


class Foreign:
    """An array of a library that is known only by DLPack's protocol and the array API's names."""

    def __init__(self, tensor):
        self.tensor = tensor

    dtype = property(lambda self: self.tensor.dtype)
    device = property(lambda self: self.tensor.device)
    shape = property(lambda self: tuple(self.tensor.shape))

    def __dlpack__(self, *, stream=None, max_version=None):
        asked_streams.append(stream)
        return self.tensor.__dlpack__(stream=stream, max_version=max_version)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self):
        return foreign_library


def foreign_empty(shape, *, dtype, device):
    return Foreign(torch.empty(shape, dtype=dtype, device=device))


foreign_library = types.SimpleNamespace(empty=foreign_empty, float32=torch.float32, float64=torch.float64)


def test_a_graph_keeps_lengths_of_every_row_that_lay_on_the_host():
    query, key, value = (torch.randn(8, 2, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lens = np.random.default_rng(0).integers(1, 1025, (8, 1024))
    expected = headway.attention(query, key, value, valid_lens=lens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = headway.attention(query, key, value, valid_lens=lens.copy())
    junk = [np.full((8, 1024), 7, np.int64) for _ in range(200)]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected), len(junk)


def test_another_library_is_told_the_stream_and_gets_its_own_arrays():
    asked_streams.clear()
    x = torch.randn(2, 3, 5, 8, device="cuda", dtype=torch.float16)
    out, lse = headway.attention(Foreign(x), Foreign(x), Foreign(x), return_lse=True)
    assert type(out) is Foreign and out.dtype == torch.float16 and lse.dtype == torch.float32
    assert asked_streams == [1] * 5, "three inputs and two results, for the default stream"
    assert torch.equal(out.tensor, headway.attention(x, x, x))
    found = headway.attention_backward(out, *3 * [Foreign(x)], out, lse)
    assert all(type(gradient) is Foreign for gradient in found[:3])


def test_a_library_whose_arrays_cannot_be_written_is_named():
    class Frozen(Foreign):
        def __array_namespace__(self):
            return types.SimpleNamespace()

    frozen = Frozen(torch.ones(3, 4, device="cuda"))
    with pytest.raises(NotImplementedError, match="attention: out cannot be made: test_cuda has no arrays on cuda:0"):
        headway.attention(frozen, frozen, frozen)


# ---- Analysis: there, with results in host memory ----


def tensors_of(analysis):
    fields = {field.name: getattr(analysis, field.name) for field in dataclasses.fields(analysis)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_analysis_agrees_with_the_oracles_matrix_for_every_option(dtype):
    for seed in SEEDS:
        case, (query, key, _), options = gpu_case(seed, dtype)
        p = oracle.attention(*as_float64(case), **case.options).weights
        rank = case.query.ndim
        found = headway.analyze(query, key, top=2, cells=3, **options)
        assert not any(array.is_cuda for array in tensors_of(found).values())
        assert found.entropy.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        logs = np.log(p, where=p > 0, out=np.zeros_like(p))
        close = {"rtol": 1e-9, "atol": 1e-9} if dtype == "float64" else {"rtol": 2e-4, "atol": 2e-4}
        for array, expected in [
            (found.entropy, -(p * logs).sum(-1)),
            (found.received, p.sum(-2)),
            (found.top_weights, -np.sort(-np.pad(p, [(0, 0)] * 3 + [(0, 2)]), -1)[..., :2]),
        ]:
            np.testing.assert_allclose(array.numpy(), without_batch_and_heads(expected, rank), **close)
        rows, keys = (p.shape[2] // 3, p.shape[2]), (p.shape[3] // 4, p.shape[3])
        expected = without_batch_and_heads(p[:, :, rows[0] :, keys[0] :], rank)
        for lse in [None, found.lse, found.lse.cuda()]:
            part = headway.weights_in(query, key, rows, keys, lse=lse, **options)
            np.testing.assert_allclose(part.numpy(), expected, **close)


def test_analysis_follows_what_the_current_stream_has_queued_and_repeats_its_bits():
    x = torch.zeros(1, 4, 700, 64, device="cuda", dtype=torch.bfloat16)
    filled = torch.randn_like(x)
    expected = headway.analyze(filled, filled, causal=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        x.copy_(filled)
        found = headway.analyze(x, x, causal=True)
    for name, array in tensors_of(found).items():
        assert torch.equal(array, getattr(expected, name)), name


def test_analysis_of_a_library_without_arrays_in_host_memory_gives_numpy_arrays():
    x = torch.randn(1, 2, 5, 8, device="cuda")
    found = headway.analyze(Foreign(x), Foreign(x))
    assert type(found.top_keys) is np.ndarray and found.top_keys.dtype == np.int64
    np.testing.assert_array_equal(found.entropy, headway.analyze(x, x).entropy.numpy())


def test_a_long_analysis_needs_no_matrix():
    x = torch.randn(1, 1, 100_000, 64, device="cuda", dtype=torch.float16)
    headway.analyze(x[:, :, :64], x[:, :, :64])
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    found = headway.analyze(x, x, causal=True)
    assert free - torch.cuda.mem_get_info()[0] < 600 << 20
    np.testing.assert_allclose(found.received.double().sum(), 100_000, rtol=1e-5)


def test_pages_of_arrays_on_a_gpu(tmp_path):
    x = torch.randn(1, 2, 300, 16, device="cuda")
    assert headway.view(x, x, path=tmp_path / "gpu.html", causal=True).stat().st_size > 10_000
    with headway.view(x, x, serve=True, causal=True) as server:
        with urllib.request.urlopen(server.url + "tile?head=1&r0=200&r1=250&k0=0&k1=300") as answer:
            cells = np.frombuffer(answer.read(), np.float32, offset=24).reshape(2, 50, 300)
        weights = headway.weights_in(x, x, (200, 250), (0, 300), causal=True)[0, 1]
        np.testing.assert_allclose(cells[0], weights.numpy(), rtol=1e-5, atol=1e-9)


# ---- Plans ----


def test_explain_names_the_kernel():
    x = torch.randn(2, 8, 1024, 128, device="cuda", dtype=torch.bfloat16)
    plan = headway.explain(x, x, x, causal=True)
    assert plan.engine == "cuda" and plan.kernel and plan.instruction_set.startswith("compute capability ")
    assert "registers" in str(plan) and "shared" in str(plan)
    assert headway.explain(x, x, x, backward=True).engine == "cuda"
    assert headway.engines()[0] == "cuda"


# ---- Errors ----


def refused():
    there = torch.ones(2, 3, 5, 8, device="cuda")
    here = torch.ones(2, 3, 5, 8)
    a, r = headway.attention, headway.attention_scores
    yield ValueError, "attention: key is on cpu, query is on cuda:0", lambda: a(there, here, there)
    yield ValueError, "attention: key is on cuda:0, query is on cpu", lambda: a(here, there, here)
    yield ValueError, "attention_scores: key is on cpu", lambda: r(there, here)
    yield ValueError, "attention: mask is on cpu", lambda: a(*3 * [there], mask=torch.ones(5, 5).bool())
    yield ValueError, "attention: alibi_slopes is on cpu", lambda: a(*3 * [there], alibi_slopes=[1.0, 2.0, 3.0])
    yield ValueError, "attention: out is on cpu, query is on cuda:0", lambda: a(*3 * [there], out=here)
    yield ValueError, "attention: key is on a GPU and comes from test_cuda", lambda: a(there, Foreign(there), there)
    yield (
        TypeError,
        "valid_lens has type torch.int16, expected i32 or i64 on cuda:0",
        lambda: a(*3 * [there], valid_lens=torch.tensor([1, 2], dtype=torch.int16).cuda()),
    )
    yield ValueError, r"attention: valid_lens\[1\] is 9, expected 0 to 5", lambda: a(*3 * [there], valid_lens=[1, 9])
    yield NotImplementedError, "attention: .*cpu: the tensors are on cuda:0", lambda: a(*3 * [there], engine="cpu")
    yield NotImplementedError, "attention: .*cuda: the tensors are on cpu", lambda: a(*3 * [here], engine="cuda")
    yield (
        NotImplementedError,
        "analyze: .*cpu: the tensors are on cuda:0",
        lambda: headway.analyze(there, there, engine="cpu"),
    )
    yield (
        ValueError,
        "weights_in: lse is on cuda:0, query is on cpu",
        lambda: headway.weights_in(here, here, (0, 1), (0, 1), lse=there[..., 0]),
    )
    rows = there[0]
    layer = headway.MultiHeadAttention(8, 2)
    yield NotImplementedError, "MultiHeadAttention: queries is on cuda", lambda: layer.forward(rows, rows, rows)


@pytest.mark.parametrize("number", range(14))
def test_what_is_refused(number):
    error, text, call = list(refused())[number]
    with pytest.raises(error, match=text):
        call()


def test_memory_that_is_not_there():
    x = torch.zeros(64, 64, 30000, 8, device="cuda", dtype=torch.float16)
    with pytest.raises(MemoryError, match="attention: could not allocate .* for weights"):
        headway.attention(x, x, x, return_weights=True)
    y = x[:1, :1, :4]
    assert torch.equal(headway.attention(y, y, y), y)


# ---- The tutorials' functions ----


def test_the_functions_of_the_tutorials():
    x = torch.randn(2, 5, 8, device="cuda", dtype=torch.float64)
    for name, call in {
        "multi_head_attention": lambda x: headway.multi_head_attention(x, x, x, 2),
        "self_attention": lambda x: headway.self_attention(x, x, x),
        "compute_qkv": lambda x: headway.compute_qkv(x, *3 * [x[0, :, :].T @ x[0, :, :]])[0],
    }.items():
        found = call(x)
        assert found.is_cuda, name
        torch.testing.assert_close(found.cpu(), torch.as_tensor(call(x.cpu())))
