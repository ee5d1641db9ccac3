"""headway.torch on a CUDA device: autograd, autocast, torch.compile, CUDA graphs, the drop-ins. Skipped without one."""

import copy
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torch_support import no_cuda

pytestmark = [
    pytest.mark.skipif(no_cuda() is not None, reason=str(no_cuda())),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's own, about contexts, profiles and what TF32 would gain
]
torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import headway.torch as ht  # noqa: E402
from headway.torch import _ops  # noqa: E402
from headway.torch._core import Options  # noqa: E402

# How far two computations of one thing may be apart, in this type.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def draw(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


def close(one, other, dtype=None):
    tolerance = TOLERANCE[dtype or one.dtype]
    torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def gradients(out, inputs, seed=0):
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    return torch.autograd.grad(out, inputs, grad)


# ---- scaled_dot_product_attention ----

SDPA = [
    {},
    {"is_causal": True},
    {"scale": 0.1},
    {"enable_gqa": True},
    {"attn_mask": "bool"},
    {"attn_mask": "float"},
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", SDPA, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_sdpa_gives_torch_s_results_and_gradients(dtype, options, dim):
    torch.manual_seed(0)
    options = dict(options)
    kv_heads = 2 if options.get("enable_gqa") else 4
    query, key, value = draw(2, 4, 130, dim), draw(2, kv_heads, 130, dim), draw(2, kv_heads, 130, dim)
    if options.get("attn_mask") == "bool":
        options["attn_mask"] = (torch.rand(2, 1, 130, 130, device="cuda") < 0.7) | torch.eye(130, device="cuda").bool()
    elif options.get("attn_mask") == "float":
        options["attn_mask"] = torch.randn(4, 130, 130, device="cuda")
    typed = {n: v.to(dtype) if n == "attn_mask" and v.dtype != torch.bool else v for n, v in options.items()}
    exact = {n: v.double() if n == "attn_mask" and v.dtype != torch.bool else v for n, v in typed.items()}
    ours = [x.detach().to(dtype).requires_grad_() for x in (query, key, value)]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    out = ht.scaled_dot_product_attention(*ours, **typed)
    expected = F.scaled_dot_product_attention(*theirs, **exact)
    assert out.dtype == dtype and out.is_cuda
    close(out, expected, dtype)
    for one, other in zip(gradients(out, ours), gradients(expected, theirs)):
        close(one, other, dtype)
    with torch.no_grad():
        assert torch.equal(ht.scaled_dot_product_attention(*ours, **typed), out)


def test_gradcheck():
    query, key, value = (draw(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    bias = draw(5, 5, dtype=torch.float64)
    torch.autograd.gradcheck(lambda *x: ht.attention(*x[:3], bias=x[3], causal=True), (query, key, value, bias))
    torch.autograd.gradgradcheck(lambda *x: ht.attention(*x), (query, key, value))


def test_the_operators_pass_torch_s_own_checks():
    query, key, value = (draw(2, 9, 3, 8).transpose(1, 2) for _ in range(3))
    torch.library.opcheck(_ops.attention, (query, key, value, *Options(causal="top_left"), False))
    with torch.no_grad():
        out, lse, _ = _ops.attention(query, key, value, *Options(), False)
    grad = torch.randn_like(out)
    torch.library.opcheck(
        _ops.attention_backward, (grad, None, query.detach(), key.detach(), value.detach(), out, lse, *Options())
    )


def test_dropout_is_repeated_by_manual_seed_and_the_cpu_drops_the_same():
    query, key, value = (draw(2, 3, 40, 16, grad=False) for _ in range(3))
    torch.manual_seed(3)
    one = ht.attention(query, key, value, dropout=0.4)
    torch.manual_seed(3)
    assert torch.equal(one, ht.attention(query, key, value, dropout=0.4))
    torch.manual_seed(3)
    close(one.cpu(), ht.attention(query.cpu(), key.cpu(), value.cpu(), dropout=0.4))


# ---- What runs the call ----


def test_autocast():
    layer = ht.MultiheadAttention(64, 4, batch_first=True, device="cuda")
    x = draw(2, 10, 64)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out, _ = layer(x, x, x, need_weights=False)
        assert out.dtype == torch.bfloat16
        assert ht.attention(*3 * [x]).dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32 and layer.in_proj_weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(dtype):
    torch._dynamo.reset()
    layer = ht.MultiheadAttention(64, 4, batch_first=True, device="cuda", dtype=dtype)

    def step(x):
        out, _ = layer(x, x, x, need_weights=False)
        return ht.scaled_dot_product_attention(out.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), is_causal=True)

    x = draw(2, 12, 64, dtype=dtype)
    compiled = torch.compile(step, fullgraph=True)
    expected, found = step(x), compiled(x)
    close(found, expected)
    for one, other in zip(gradients(found, [x]), gradients(expected, [x])):
        close(one, other)


def test_a_captured_graph_trains():
    """Forward, backward and the optimizer's step as one CUDA graph, replayed with other data in the same tensors."""
    torch.manual_seed(0)
    plain = ht.MultiheadAttention(128, 2, batch_first=True, device="cuda", dtype=torch.bfloat16)
    captured = copy.deepcopy(plain)
    batches = torch.randn(6, 2, 192, 128, device="cuda", dtype=torch.bfloat16)

    def step(model, x):
        for parameter in model.parameters():
            parameter.grad = None
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device="cuda", dtype=torch.bfloat16)
        out = model(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        loss = (out.float() - x.float()).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
        return loss

    x = torch.zeros_like(batches[0])
    x.copy_(batches[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    saved = copy.deepcopy(captured.state_dict())
    with torch.cuda.stream(stream):
        step(captured, x)
    torch.cuda.current_stream().wait_stream(stream)
    captured.load_state_dict(saved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(captured, x)
    for batch in batches:
        x.copy_(batch)
        graph.replay()
        expected = step(plain, batch)
        assert torch.equal(loss, expected)
    for one, other in zip(captured.parameters(), plain.parameters()):
        assert torch.equal(one, other)


def test_nothing_waits_for_the_device():
    layer = ht.MultiheadAttention(64, 4, dropout=0.1, batch_first=True, device="cuda")
    x = draw(2, 10, 64)
    padding = torch.zeros(2, 10, device="cuda").bool()
    lengths = torch.tensor([3, 4], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, _ = layer(x, x, x, key_padding_mask=padding)
        out = out + layer(x, x, x, need_weights=False)[0]
        ht.attention(*3 * [out], valid_lens=lengths, dropout=0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None


def test_a_stream_of_the_user_s_own():
    x = draw(4, 8, 256, 64, dtype=torch.bfloat16)
    expected = gradients(ht.attention(x, x, x, causal=True), [x])[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        found = gradients(ht.attention(x, x, x, causal=True), [x])[0]
    stream.synchronize()
    assert torch.equal(found, expected)


def test_calls_on_many_streams_and_threads_have_scratch_buffers_of_their_own():
    torch.manual_seed(0)
    inputs = [[draw(1, 4, length, 64, dtype=torch.bfloat16) for _ in range(3)] for length in range(100, 2000, 160)]

    def train(leaves):
        out = ht.scaled_dot_product_attention(*leaves, is_causal=True)
        return [out, *torch.autograd.grad(out, leaves, out.detach())]

    expected = [train(leaves) for leaves in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]  # more than keep a buffer
    torch.cuda.synchronize()

    def on_stream(number):
        found = []
        for step in range(len(inputs)):
            with torch.cuda.stream(streams[(number + step // 2) % len(streams)]):  # two threads at a time on each
                found.append((step, train(inputs[step])))
        return found

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(on_stream, range(8)))
    torch.cuda.synchronize()
    for found in results:
        for step, tensors in found:
            assert all(map(torch.equal, tensors, expected[step]))


def test_a_graph_and_the_calls_around_it_have_scratch_buffers_of_their_own():
    torch.manual_seed(0)
    leaves = [draw(2, 4, 700, 64, dtype=torch.bfloat16, grad=False) for _ in range(3)]
    others = [draw(2, 4, 900, 64, dtype=torch.bfloat16, grad=False) for _ in range(3)]

    def call(x):
        return ht.scaled_dot_product_attention(*x, is_causal=True)

    expected, expected_others = call(leaves), call(others)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call(leaves)
    for _ in range(20):  # replays on one stream beside calls on another
        with torch.cuda.stream(side):
            graph.replay()
        assert torch.equal(call(others), expected_others)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_other_streams_can_be_recorded_for_results_and_gradients():
    leaves = [draw(1, 2, 64, 64, dtype=torch.bfloat16) for _ in range(3)]
    out = ht.scaled_dot_product_attention(*leaves)
    side, results = torch.cuda.Stream(), [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    del out
    while results:
        x = results.pop()
        address = x.data_ptr()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # cycles
            x.record_stream(side)
        del x
        again = [torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(64)]
        assert all(y.data_ptr() != address for y in again)  # still in use by the side stream
        torch.cuda.synchronize()


def test_saved_memory_is_query_key_value_out_and_lse():
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    query, key, value = (draw(2, 8, 512, 64, dtype=torch.bfloat16) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = ht.attention(query, key, value, causal=True)
    sizes = {x.data_ptr(): x.numel() * x.element_size() for x in saved}
    assert sum(sizes.values()) == 4 * out.numel() * 2 + 2 * 8 * 512 * 4


# ---- Modules ----


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
def test_a_grid_of_options_of_multihead_attention():
    from test_torch_multihead import combinations, make_case, run

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().cuda().requires_grad_(x.requires_grad)

    for seed, case in enumerate(combinations(60)):
        theirs, ours, inputs, options = make_case(case, seed)
        expected, expected_grads = run(theirs, inputs, options)
        there = {name: move(value) for name, value in options.items()}
        found, grads = run_on_gpu(run, ours.cuda(), [move(x) for x in inputs], there)
        for one, other in zip((*found, *grads), (*expected, *expected_grads), strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-10, msg=lambda t, c=case: f"{c}: {t}")


def run_on_gpu(run, module, inputs, options):
    """run() draws the results' gradients on the CPU; they are the same there and here."""
    randn = torch.randn
    torch.randn = lambda *sizes, **keywords: randn(*sizes, **keywords).cuda()
    try:
        return run(module, inputs, options)
    finally:
        torch.randn = randn


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_is_one_product_each_way_and_no_copy(batch_first):
    layer = ht.MultiheadAttention(256, 4, batch_first=batch_first, device="cuda", dtype=torch.bfloat16)
    x = draw(2, 128, 256, dtype=torch.bfloat16)
    layer(x, x, x, need_weights=False)[0].sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out, _ = layer(x, x, x, need_weights=False)
        out.backward(x.detach())
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::addmm"] == 2, "one product for query, key and value, one for the output"
    copies = {name: calls.get(name, 0) for name in ("aten::cat", "aten::contiguous", "aten::clone", "aten::copy_")}
    assert set(copies.values()) == {0}, copies


@pytest.mark.parametrize("training", [True, False])
def test_averaged_weights_store_no_head_s_matrix(training):
    layer = ht.MultiheadAttention(256, 8, batch_first=True, device="cuda", dtype=torch.bfloat16).train(training)
    x = draw(2, 1024, 256, dtype=torch.bfloat16)
    _, expected = layer(x, x, x, average_attn_weights=False)
    expected = expected.detach().double().mean(dim=1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.set_grad_enabled(training):
        out, weights = layer(x, x, x)
    assert torch.cuda.max_memory_allocated() - before < 4 * weights.nbytes, "eight heads have eight matrices"
    close(weights, expected, torch.bfloat16)
    assert weights.requires_grad == training
    if training:
        (out.sum() + weights.square().sum()).backward()
        assert x.grad.isfinite().all()


def test_an_encoder_with_attention_replaced():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    x = draw(3, 20, 64)
    padding = torch.arange(20, device="cuda") >= torch.tensor([[20], [11], [5]], device="cuda")
    for training in (True, False):
        model.train(training)
        expected = model(x, src_key_padding_mask=padding)
        ht.replace_attention(model)
        found = model(x, src_key_padding_mask=padding)
        ht.restore_attention(model)
        close(found[~padding], expected[~padding])


def test_the_tutorials_module():
    torch.manual_seed(0)
    mha = ht.MultiHeadAttention(32, 4).double()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    expected = mha(x, x, x)
    close(mha.cuda()(*3 * [x.cuda()]).cpu(), expected)


@pytest.mark.filterwarnings("ignore")
def test_hugging_face():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ht.register_with_transformers()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().cuda()
    ids = torch.randint(1, 50, (2, 9), device="cuda")
    attention_mask = torch.ones_like(ids)
    attention_mask[1, :4] = 0
    found = {}
    for name in ("eager", "headway"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits = model(ids, attention_mask=attention_mask).logits
        options = {"attention_mask": attention_mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        found[name] = logits[attention_mask.bool()], model.generate(ids, **options)
    close(found["headway"][0], found["eager"][0])
    assert torch.equal(found["headway"][1], found["eager"][1])


def test_data_parallel_training(tmp_path):
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        layer = ht.MultiheadAttention(64, 4, batch_first=True, device="cuda")
        model = nn.parallel.DistributedDataParallel(layer, device_ids=[0])
        x = draw(2, 10, 64)
        model(x, x, x, need_weights=False)[0].sum().backward()
        assert all(math.isfinite(p.grad.abs().sum().item()) for p in layer.parameters())
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
def test_a_split_sequence_on_one_rank_of_nccl(tmp_path, scheme, dtype):
    from headway.distributed import Sharding
    from headway.torch import distributed as context_parallel

    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        inputs = [draw(2, 4, 300, 64, dtype=dtype) for _ in range(3)]
        parts = [(0, 110), (110, 300)]  # two ranges: four parts of which one is masked
        found, lse = context_parallel.attention(
            *inputs, causal=True, window=(200, 0), scheme=scheme, sharding=Sharding([parts], [parts]), return_lse=True
        )
        whole, whole_lse = ht.attention(*inputs, causal=True, window=(200, 0), return_lse=True)
        close(found, whole)
        close(lse, whole_lse, dtype)
        for one, other in zip(gradients(found, inputs), gradients(whole, inputs), strict=True):
            close(one, other, dtype)
        with pytest.raises(NotImplementedError, match="attention: dropout over a split sequence works in host memory"):
            context_parallel.attention(*inputs, dropout=0.5, seed=1)
        with pytest.raises(ValueError, match="attention: the tensors are on cpu, expected a group with gloo"):
            context_parallel.attention(*(x.detach().cpu() for x in inputs))
    finally:
        distributed.destroy_process_group()


# ---- What is refused ----


def test_tensors_on_two_devices():
    there, here = torch.ones(1, 2, 3, 4, device="cuda"), torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="scaled_dot_product_attention: key is on cpu, query is on cuda:0"):
        ht.scaled_dot_product_attention(there, here, here)
    with pytest.raises(ValueError, match="attention: key is on cpu, query is on cuda:0"):
        ht.attention(there, here, here)
    with pytest.raises(ValueError, match="attention: mask is on cpu, query is on cuda:0"):
        ht.attention(there, there, there, mask=torch.ones(3, 3).bool())


# ---- Torch's own functions ----


@pytest.mark.skipif(not hasattr(nn.attention, "register_flash_attention_impl"), reason="this torch has no registry")
def test_torchs_own_functions_run_on_headway_while_it_is_active(monkeypatch):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    from headway.torch import route

    asked = []
    real = route._headway.torch_attention
    monkeypatch.setattr(route._headway, "torch_attention", lambda *args: asked.append(1) or real(*args))
    q, k, v = (draw(2, 4, 96, 64, dtype=torch.bfloat16) for _ in range(3))
    rows = [x.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for x in (q, k, v)]
    starts = torch.tensor([0, 96, 192], device="cuda", dtype=torch.int32)

    def results():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        packed = varlen_attn(*rows, starts, starts, 96, 96)
        return (out, *gradients(out, (q, k, v)), packed, *gradients(packed, rows))

    expected = results()
    ht.activate()
    try:
        found = results()
    finally:
        ht.deactivate()
    assert len(asked) == 2
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    results()
    assert len(asked) == 2


def test_a_model_on_the_gpu_is_recorded_and_analyzed_there(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(64, 4, batch_first=True).cuda().eval()
    x = torch.randn(1, 40, 64, device="cuda")
    with torch.no_grad(), ht.record(model) as recording:
        _, weights = model(x, x, x, average_attn_weights=False)
    (call,) = recording.calls
    assert call.query.is_cuda and call.key.is_cuda
    (found,) = recording.analyze(top=1)
    torch.testing.assert_close(found.top_weights[..., 0], weights.amax(-1).cpu(), atol=1e-5, rtol=1e-4)
    assert recording.view(path=tmp_path / "page.html").stat().st_size > 10_000
    with torch.no_grad(), ht.record(model, device="cpu") as recording:
        model(x, x, x)
    assert not recording.calls[0].query.is_cuda


def test_two_processes_that_share_a_gpu_compute_what_one_does():
    program = Path(__file__).parents[2] / "benchmarks/gpu_ring.py"
    done = subprocess.run([sys.executable, str(program), "--only-check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bits" in done.stdout
