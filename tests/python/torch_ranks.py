"""Checks of headway.torch.distributed that every rank of a group runs; test_torch_distributed.py starts the ranks.

python torch_ranks.py CHECKS=RANKS ... forks that many ranks for each argument, one after the other.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist

import headway.distributed as shards
import headway.masks
import headway.torch
import headway.torch.distributed as context_parallel
import oracle
from torch_pairs import answers, check_pairs

torch.set_num_threads(1)

LENGTH, KEYS = 37, 53


def inputs(queries: int = LENGTH, keys: int = LENGTH, dtype: torch.dtype = torch.float32, heads: int = 4):
    random = np.random.default_rng(queries + keys)
    shapes = ((2, heads, queries, 16), (2, 2, keys, 16), (2, 2, keys, 8), (2, heads, queries, 8))
    return [torch.from_numpy(random.standard_normal(shape)).to(dtype) for shape in shapes]


def cases():
    """Options, lengths and type of calls; every rank makes the same ones."""
    random = np.random.default_rng(3)
    mask = torch.from_numpy(random.random((2, 1, LENGTH, KEYS)) < 0.7)
    bias = torch.from_numpy(random.standard_normal((1, 4, LENGTH, KEYS)))
    sinks = torch.from_numpy(random.standard_normal(4)).float()
    yield {}, LENGTH, KEYS, torch.float32
    yield {"causal": True}, LENGTH, LENGTH, torch.float32
    yield {"causal": True}, LENGTH, LENGTH, torch.float64
    yield {"causal": True, "softcap": 3.0}, LENGTH, LENGTH, torch.bfloat16
    yield {"causal": "bottom_right", "window": (9, 0)}, LENGTH, KEYS, torch.float32
    yield {"window": (3, 5), "scale": 0.7}, LENGTH, LENGTH, torch.float32
    yield {"valid_lens": [20, 0], "query_lens": [LENGTH, 5], "causal": "bottom_right"}, LENGTH, KEYS, torch.float32
    yield {"mask": mask, "bias": bias}, LENGTH, KEYS, torch.float32
    yield (
        {"sinks": sinks, "causal": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
        LENGTH,
        LENGTH,
        torch.float32,
    )
    yield {"causal": "bottom_right"}, 1, KEYS, torch.float32
    yield {"bias": bias[:, :, :1], "dropout": 0.3, "seed": 12345678901}, LENGTH, KEYS, torch.float32
    ids = np.arange(LENGTH) // 11
    documents = headway.masks.documents(ids) & headway.masks.causal()
    yield {"mask": documents, "dropout": 0.5, "seed": 7}, LENGTH, LENGTH, torch.float32


def plain(x):
    if isinstance(x, headway.masks.Mask):
        return x.to_bool(LENGTH, LENGTH)
    return x.detach().double().numpy() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def shardings(queries, keys, ranks):
    yield None
    yield shards.zigzag(queries, keys, ranks=ranks)
    uneven = [queries] + [0] * (ranks - 1), [keys // ranks] * (ranks - 1) + [keys - keys // ranks * (ranks - 1)]
    yield shards.contiguous(*uneven)


def check_numbers(rank: int, ranks: int) -> None:
    turn = 0
    for options, queries, keys, dtype in cases():
        query, key, value, grad_out = inputs(queries, keys, dtype)
        numbers = {name: plain(x) for name, x in options.items()}
        expected = oracle.attention(*map(plain, (query, key, value)), **numbers)
        expected_gradients = oracle.gradients(*map(plain, (grad_out, query, key, value)), **numbers)
        tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}[dtype]
        kinds = list(shardings(queries, keys, ranks))
        for sharding in kinds if ranks == 2 else kinds[turn % 3 :][:1]:
            held = sharding or shards.contiguous(queries, keys, ranks=ranks)
            scheme = ("automatic", "ring", "all_gather", "heads" if ranks <= 2 else "ring", "pass_query")[turn % 5]
            has_rows = [name for name in ("mask", "bias") if isinstance(options.get(name), torch.Tensor)]
            if has_rows and scheme in ("heads", "pass_query"):
                scheme = "ring"
            turn += 1
            mine = [shards.take(x, held[side][rank]) for x, side in ((query, 0), (key, 1), (value, 1))]
            for x in mine:
                x.requires_grad_()
            own = dict(options)
            repeats = "bias" in own and own["bias"].shape[2] == 1
            for name in has_rows:
                if not (name == "bias" and repeats):
                    own[name] = shards.take(own[name], held.queries[rank])
            for name in ("bias", "sinks"):
                if name in own:
                    own[name] = own[name].clone().requires_grad_()
            out, lse = context_parallel.attention(
                *mine, sharding=sharding, scheme=scheme, return_lse=True, timeout=20, **own
            )
            out.backward(shards.take(grad_out, held.queries[rank]))
            what = f"{options}, {scheme}, {sharding}, rank {rank} of {ranks}"

            def near(found, exact, side, what=what, held=held, tolerance=tolerance):
                exact = shards.take(exact, held[side][rank], axis=2)
                np.testing.assert_allclose(plain(found), exact, rtol=tolerance, atol=tolerance, err_msg=what)

            near(out, expected.out, 0)
            near(lse, expected.lse, 0)
            for x, name, side in zip(mine, ("query", "key", "value"), (0, 1, 1), strict=True):
                near(x.grad, expected_gradients[name], side)
            if "sinks" in own:
                np.testing.assert_allclose(own["sinks"].grad, expected_gradients["sinks"], rtol=1e-4, atol=1e-4)
            if repeats:  # the gradient of all ranks' rows
                np.testing.assert_allclose(own["bias"].grad, expected_gradients["bias"], rtol=1e-4, atol=1e-4)
            elif "bias" in own:
                near(own["bias"].grad, expected_gradients["bias"], 0)


def check_packed(rank: int, ranks: int) -> None:
    starts = [0, 5, 5, 17, 40]
    random = np.random.default_rng(1)
    query, key, value = (torch.from_numpy(random.standard_normal((40, 2, 8))).float() for _ in range(3))
    sharding = shards.balanced(40, ranks=ranks, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)
    mine = [shards.take(x, sharding.queries[rank], axis=0).requires_grad_() for x in (query, key, value)]
    bounds = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    out = context_parallel.attention(*mine, causal=True, sharding=sharding, timeout=20, **bounds)
    whole = np.zeros((40, 2, 8))
    for begin, end in itertools.pairwise(starts):
        parts = [plain(x[begin:end]).swapaxes(0, 1)[None] for x in (query, key, value)]
        whole[begin:end] = oracle.attention(*parts, causal=True).out[0].swapaxes(0, 1)
    np.testing.assert_allclose(plain(out), shards.take(whole, sharding.queries[rank], axis=0), atol=2e-5)
    out.sum().backward()


def check_dtensors(rank: int, ranks: int) -> None:
    if ranks != 2:  # what DTensors import at their first use takes seconds on each rank
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    query, key, value, _ = inputs(LENGTH, LENGTH)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    expected = oracle.attention(*map(plain, (query, key, value)), causal=True).out
    for placement in (Shard(2), Shard(1), Shard(0), Replicate()):
        tensors = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in (query, key, value)]
        out = context_parallel.attention(*tensors, causal=True)
        assert out.placements == (placement,)
        np.testing.assert_allclose(plain(out.full_tensor()), expected, atol=2e-5)
        out.to_local().sum().backward()
        assert tensors[0].grad.placements == (placement,)
    # The library's own function finds the shards too.
    tensors = [distribute_tensor(x, mesh, [Shard(2)]) for x in (query, key, value)]
    out, lse = headway.torch.attention(*tensors, causal=True, return_lse=True)
    assert out.placements == lse.placements == (Shard(2),)
    np.testing.assert_allclose(plain(out.full_tensor()), expected, atol=2e-5)
    found = text_of(lambda: headway.torch.attention(*tensors, return_weights=True))
    assert found.startswith("NotImplementedError: attention: weights of DTensors"), found
    # A mesh in place of a group, through the module.
    held = shards.contiguous(LENGTH, ranks=ranks)
    mine = [shards.take(x, held.queries[rank]) for x in (query, key, value)]
    out = context_parallel.Attention(mesh, causal=True)(*mine)
    np.testing.assert_allclose(plain(out), shards.take(expected, held.queries[rank]), atol=2e-5)


class Projected(torch.nn.Module):
    """Attention over a split sequence between two linear layers."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.inputs, self.outputs = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        parts = self.inputs(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.outputs(self.attention(*parts).transpose(1, 2).flatten(2))


def check_wrapped(rank: int, ranks: int) -> None:
    """Under DDP and FSDP2 parameters get the gradients of one process, which both divide by the number of ranks."""
    if ranks != 2:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x = inputs(LENGTH, LENGTH)[0].flatten(1, 2)[:, :LENGTH]  # (2, S, 16)
    held = shards.zigzag(LENGTH, ranks=ranks)
    split = context_parallel.Attention(causal=True, sharding=held)

    def gradients(attention, rows, wrap=None):
        torch.manual_seed(0)
        model = Projected(attention)
        model = wrap(model) if wrap else model
        model(rows).square().sum().backward()
        found = [p.grad for p in model.parameters()]
        return [ranks * g.full_tensor() if hasattr(g, "full_tensor") else ranks * g if wrap else g for g in found]

    whole = gradients(functools.partial(headway.torch.attention, causal=True), x)
    mine = shards.take(x, held.queries[rank])
    mesh = init_device_mesh("cpu", (ranks,))
    for wrap in (torch.nn.parallel.DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)):
        for found, expected in zip(gradients(split, mine, wrap), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def check_mesh_of_two_axes(rank: int, ranks: int) -> None:
    """Batch or heads on one axis of the mesh, the sequence on the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    query, key, value, grad_out = inputs(LENGTH, LENGTH)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    numbers = list(map(plain, (query, key, value)))
    expected = oracle.attention(*numbers, causal=True).out
    gradients = oracle.gradients(plain(grad_out), *numbers, causal=True)
    for placement in ((Shard(0), Shard(2)), (Shard(2), Shard(1)), (Shard(0), Shard(1)), (Replicate(), Shard(2))):
        tensors = [distribute_tensor(x, mesh, placement).requires_grad_() for x in (query, key, value)]
        out = context_parallel.attention(*tensors, causal=True)
        assert out.placements == placement
        np.testing.assert_allclose(plain(out.full_tensor()), expected, atol=2e-5)
        out.backward(distribute_tensor(grad_out, mesh, placement))
        for x, name in zip(tensors, ("query", "key", "value"), strict=True):
            np.testing.assert_allclose(plain(x.grad.full_tensor()), gradients[name], atol=5e-5, err_msg=str(placement))
    twice = [distribute_tensor(x, mesh, (Shard(2), Shard(2))) for x in (query, key, value)]
    found = text_of(lambda: context_parallel.attention(*twice, causal=True))
    assert found.startswith("ValueError: attention: query is placed as (Shard(dim=2), Shard(dim=2))"), found


def text_of(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def check_errors(rank: int, ranks: int) -> None:
    last = rank == ranks - 1
    x = torch.zeros(1, 2, 4, 16 if last else 8)
    found = text_of(lambda: context_parallel.attention(x, x, x))
    if ranks > 1:
        expected = f"head_dim is 8 on rank 0 and 16 on rank {ranks - 1}, expected the same on all ranks"
        assert found == f"ValueError: distributed::attention: {expected}", found
    x = torch.zeros(1, 2, 4, 8)
    found = text_of(lambda: context_parallel.attention(x, x, x, causal=bool(last)))
    assert ranks == 1 or "causal is none on rank 0 and square on rank" in found, found
    found = text_of(lambda: context_parallel.attention(x, x.double() if last else x, x))
    assert found == f"TypeError: distributed::attention: rank {ranks - 1}: key has type f64, query has f32", found
    found = text_of(lambda: context_parallel.attention(x, x, x, scheme="star"))
    assert found.startswith("ValueError: distributed_attention: scheme is 'star', expected 'automatic'"), found
    found = text_of(lambda: context_parallel.attention(x, x, x, group=3))
    assert found == "TypeError: attention: group is a int, expected a ProcessGroup or a DeviceMesh", found
    if ranks > 1:  # the last: one rank does not come
        if not last:
            start = time.monotonic()
            found = text_of(lambda: context_parallel.attention(x, x, x, timeout=0.3))
            assert found.startswith("LostRank: attention: rank "), found
            assert time.monotonic() - start < 5
        else:
            time.sleep(0.6)


def check_bits(rank: int, ranks: int) -> None:
    query, key, value, grad_out = inputs(LENGTH, LENGTH)
    held = shards.zigzag(LENGTH, ranks=ranks)
    seen = set()
    for _ in range(20):
        mine = [shards.take(x, held.queries[rank]).requires_grad_() for x in (query, key, value)]
        out = context_parallel.attention(*mine, causal=True, sharding=held, scheme="ring")
        out.backward(shards.take(grad_out, held.queries[rank]))
        seen.add(b"".join(x.detach().numpy().tobytes() for x in (out, *(x.grad for x in mine))))
    assert len(seen) == 1


def check_on_device(rank: int, ranks: int) -> None:
    """What runs on a GPU, on the CPU: torch moves the rows, and parts are merged and summed in torch."""
    from headway.torch import _on_device

    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    turn = 0
    for options, queries, keys, dtype in (
        ({}, LENGTH, KEYS, torch.float32),
        ({"causal": True}, LENGTH, LENGTH, torch.float64),
        ({"causal": True, "softcap": 3.0}, LENGTH, LENGTH, torch.bfloat16),
        ({"causal": "bottom_right", "window": (9, 0), "alibi_slopes": slopes}, LENGTH, KEYS, torch.float32),
        ({"window": (3, 5), "scale": 0.7}, LENGTH, LENGTH, torch.float32),
        ({"valid_lens": [20, 0], "causal": "top_left"}, LENGTH, KEYS, torch.float32),
        ({"mask": headway.masks.documents(np.arange(LENGTH) // 11)}, LENGTH, LENGTH, torch.float32),
    ):
        query, key, value, grad_out = inputs(queries, keys, dtype)
        numbers = {name: plain(x) for name, x in options.items()}
        expected = oracle.attention(*map(plain, (query, key, value)), **numbers)
        gradients = oracle.gradients(*map(plain, (grad_out, query, key, value)), **numbers)
        tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}[dtype]
        for scheme in ("ring", "all_gather", "automatic"):
            sharding = list(shardings(queries, keys, ranks))[turn % 3]
            turn += 1
            held = sharding or shards.contiguous(queries, keys, ranks=ranks)
            keywords = {"sharding": sharding, "scheme": scheme, **options}
            call = _on_device.make_call(dist.group.WORLD, 20, keywords, query.device)
            call = call._replace(staged=turn % 2 == 0)  # through host memory, as gloo carries a GPU's rows
            mine = [shards.take(x, held[side][rank]) for x, side in ((query, 0), (key, 1), (value, 1))]
            out, lse = _on_device.forward(call, *mine)
            found = _on_device.backward(call, shards.take(grad_out, held.queries[rank]), *mine, out, lse)
            what = f"{options}, {scheme}, {sharding}, rank {rank} of {ranks}"
            for one, exact, side in (
                (out, expected.out, 0), (lse, expected.lse, 0), (found[0], gradients["query"], 0),
                (found[1], gradients["key"], 1), (found[2], gradients["value"], 1),
            ):  # fmt: skip
                exact = shards.take(exact, held[side][rank], axis=2)
                np.testing.assert_allclose(plain(one), exact, rtol=tolerance, atol=tolerance, err_msg=what)

    def refused(x, **keywords):
        call = _on_device.make_call(dist.group.WORLD, 20, {"scheme": "automatic", **keywords}, x.device)
        return text_of(lambda: _on_device.forward(call, x, x, x))

    last = rank == ranks - 1
    x = torch.zeros(1, 2, 4, 8)
    found = refused(torch.zeros(1, 2, 4, 16) if last else x)
    assert ranks == 1 or found.startswith("ValueError: attention: head_dim is 8 on rank 0 and 16 on rank "), found
    found = refused(x, causal=last)
    assert ranks == 1 or found.startswith("ValueError: attention: causal is None on rank 0 and True on rank "), found
    found = refused(torch.zeros(4, 8) if last else x)
    assert found == f"ValueError: attention: rank {ranks - 1}: query has 2 axes, expected (B, H, S, D)", found
    found = refused(x, sharding=shards.contiguous(4 * ranks + 1, ranks=ranks))
    assert "brings 4 queries and 4 keys, its shard has 5 and 5" in found, found
    for options in ({"cu_seqlens_q": x}, {"dropout": 0.5}, {"scheme": "heads"}):
        found = text_of(
            lambda options=options: _on_device.make_call(dist.group.WORLD, 20, {"scheme": "ring", **options}, x.device)
        )
        assert found.startswith("NotImplementedError: attention: "), found


def check_infinite_scores(rank: int, ranks: int) -> None:
    """A part whose scores of a row are all -inf leaves the row to other parts; NaN, and whole rows of -inf, are NaN."""
    from headway.torch import _on_device

    held = shards.contiguous(LENGTH, ranks=ranks)
    query, key, value, _ = inputs()
    query = query.abs()
    for (begin, _), *_ in held.queries[1:]:  # with the window, a row sees its own key and the one before
        key[0, :, begin - 1] = -torch.inf  # of the rank before
        key[1, 0, begin - 1 : begin + 1] = -torch.inf
        key[1, 1, begin - 1] = torch.nan
    options = {"window": (1, 0)}
    expected = headway.torch.attention(query, key, value, return_lse=True, **options)
    assert expected[1][0].isfinite().all() and (ranks == 1 or expected[1][1].isnan().any())
    mine = [shards.take(x, held.queries[rank]) for x in (query, key, value)]
    call = _on_device.make_call(dist.group.WORLD, 20, {"sharding": held, "scheme": "ring", **options}, query.device)
    found = (
        context_parallel.attention(*mine, sharding=held, scheme="ring", return_lse=True, **options),
        _on_device.forward(call, *mine),
        _on_device.forward(call._replace(staged=True), *mine),
    )
    for one in found:
        for x, whole in zip(one, expected, strict=True):
            torch.testing.assert_close(x, shards.take(whole, held.queries[rank], axis=2), equal_nan=True)


def check_killed(rank: int, ranks: int) -> None:
    x = torch.randn(1, 2, 64, 16)
    context_parallel.attention(x, x, x)
    if rank == ranks - 1:
        os._exit(0)
    start = time.monotonic()
    try:
        context_parallel.attention(x, x, x, timeout=5)
    except context_parallel.LostRank as error:
        assert "has left or has not answered" in str(error)
        assert time.monotonic() - start < 10
        os._exit(0)
    raise AssertionError("nothing was raised")


def check_stopped(rank: int, ranks: int) -> None:
    """A rank that hangs with its sockets open: only the timeout tells."""
    x = torch.randn(1, 2, 64, 16)
    context_parallel.attention(x, x, x)
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # until forked() ends it, when the others are through
        os._exit(0)
    start = time.monotonic()
    found = text_of(lambda: context_parallel.attention(x, x, x, timeout=1.0))
    assert found.startswith(f"LostRank: attention: rank {ranks - 1} has left or has not answered rank {rank}"), found
    assert 0.9 < time.monotonic() - start < 7
    os._exit(0)


CHECKS = {
    "pairs": (check_pairs,),
    "all": (
        check_numbers,
        check_packed,
        check_dtensors,
        check_wrapped,
        check_bits,
        check_on_device,
        check_infinite_scores,
        check_errors,
    ),
    "mesh": (check_mesh_of_two_axes,),
    "killed": (check_killed,),
    "stopped": (check_stopped,),
}


def run(name: str, rank: int, ranks: int) -> None:
    for check in CHECKS[name]:
        check(rank, ranks)


def forked(name: str, ranks: int, folder: str) -> None:
    """Ranks as children of this process, which has imported everything and computed nothing."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401  (the first backward imports it)

    if name == "pairs":
        answers()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder}/{name}{ranks}", rank=rank, world_size=ranks
                )
                run(name, rank, ranks)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    failed = []
    for rank, child in enumerate(children):
        if name == "stopped" and rank == ranks - 1:
            os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] not in ((signal.SIGKILL,) if name == "stopped" and rank == ranks - 1 else (0,)):
            failed.append(rank)
    if failed:
        sys.exit(f"{name} with {ranks} ranks: failed on ranks {failed}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for argument in sys.argv[1:]:
            name, number = argument.split("=")
            forked(name, int(number), place)
