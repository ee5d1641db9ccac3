"""Every option with every other on split sequences: the random calls of cases.py on the ranks of torch_ranks.py."""

from __future__ import annotations

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist

import headway.distributed as shards
import headway.torch.distributed as context_parallel
import oracle
from cases import DTYPES, assert_close, random_case
from headway.torch import _on_device

SEEDS = range(80)
OPTIONS = (
    "mask", "bias", "causal", "window", "valid_lens", "query_lens", "scale", "softcap", "alibi_slopes", "sinks",
    "dropout",
)  # fmt: skip


@functools.cache
def answers():
    """Cases with the oracle's results: computed once, before the ranks are forked."""
    found = []
    for seed, dtype in zip(SEEDS, itertools.cycle(DTYPES)):
        case = random_case(seed, dtype, rank=4)
        plain = [np.asarray(x).astype(np.float64) for x in case.inputs]
        expected = oracle.attention(*plain, **case.options)
        grad_out = np.random.default_rng(seed).standard_normal(expected.out.shape).astype(DTYPES[dtype])
        gradients = oracle.gradients(grad_out.astype(np.float64), *plain, **case.options)
        found.append((dtype, case, grad_out, expected, gradients))
    pairs = {pair for _, case, *_ in found for pair in itertools.combinations(sorted(case.options), 2)}
    missing = set(itertools.combinations(sorted(OPTIONS), 2)) - pairs
    assert not missing, missing
    return found


def tensor(array):
    """The same memory as torch has it."""
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def array(x):
    x = x.detach()
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def shardings(queries, keys, ranks):
    """In pieces of each rank, in the order of the ranks, and all rows on the last one."""
    yield shards.zigzag(queries, keys, ranks=ranks)
    yield shards.contiguous(queries, keys, ranks=ranks)
    alone = [0] * (ranks - 1)
    yield shards.contiguous([*alone, queries], [*alone, keys])


def scheme_of(turn, case, ranks):
    scheme = ("ring", "all_gather", "pass_query", "heads", "hybrid")[turn % 5]
    kv_heads = case.key.shape[1]
    rows = "mask" in case.options or "bias" in case.options  # which queries may not leave
    possible = {"pass_query": not rows, "heads": not rows and kv_heads >= ranks,
                "hybrid": not rows and ranks == 4 and kv_heads >= 2}  # fmt: skip
    return scheme if possible.get(scheme, True) else ("ring", "all_gather")[turn % 2]


def check_pairs(rank, ranks):
    """Forward and backward of every case, each under another scheme and sharding."""
    for turn, (dtype, case, grad_out, expected, exact) in enumerate(answers()):
        queries, keys = case.query.shape[2], case.key.shape[2]
        sharding = list(shardings(queries, keys, ranks))[turn % 3]
        scheme = scheme_of(turn, case, ranks)
        mine, theirs = sharding.queries[rank], sharding.keys[rank]
        inputs = [
            tensor(shards.take(x, rows)).requires_grad_()
            for x, rows in ((case.query, mine), (case.key, theirs), (case.value, theirs))
        ]
        options = dict(case.options)
        own_rows = {}  # of mask and bias: whether each query has its own
        for name in ("mask", "bias"):
            if name in options:
                given = options[name]
                own_rows[name] = queries > 1 and given.ndim > 1 and given.shape[-2] == queries
                options[name] = tensor(shards.take(given, mine, axis=given.ndim - 2) if own_rows[name] else given)
        for name in ("alibi_slopes", "sinks"):
            if name in options:
                options[name] = tensor(options[name])
        for name in ("bias", "sinks"):
            if name in options:
                options[name] = options[name].clone().requires_grad_()
        out, lse = context_parallel.attention(
            *inputs, sharding=sharding, scheme=scheme, return_lse=True, timeout=60, **options
        )
        out.backward(tensor(shards.take(grad_out, mine)))
        found = {"out": out, "lse": lse, **dict(zip(("query", "key", "value"), (x.grad for x in inputs), strict=True))}
        found |= {name: options[name].grad for name in ("bias", "sinks") if name in options}
        results = [(scheme, found)]
        if not_on_a_gpu(case.options):
            with pytest.raises(NotImplementedError, match="works in host memory, not on a GPU"):
                on_device(inputs, grad_out, mine, sharding, turn, options)
        else:
            results.append(("on a device", on_device(inputs, grad_out, mine, sharding, turn, options)))
        dropout = case.options.get("dropout", 0)
        keep = 1 / (1 - dropout) if dropout < 1 else 1
        wide = "float64" if dtype == "float64" else "float32"
        for way, found in results:
            what = f"seed {SEEDS[turn]}, {dtype}, {way}, {sharding}, rank {rank} of {ranks}: {case.options}"
            for name, x in found.items():
                whole = {"out": expected.out, "lse": expected.lse, **exact}[name]
                if name in ("out", "lse", "query"):
                    whole = shards.take(whole, mine, axis=2)
                elif name in ("key", "value"):
                    whole = shards.take(whole, theirs, axis=2)
                elif name == "bias" and own_rows["bias"]:
                    whole = shards.take(whole, mine, axis=whole.ndim - 2)
                elif name == "bias" and each_has_one_query(sharding):
                    continue
                try:
                    scale = {"out": keep, "lse": 1.0}.get(name, 4.0)
                    assert_close(array(x), whole, wide if name == "lse" else dtype, scale)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {what}") from error


def not_on_a_gpu(options):
    lengths = [np.ndim(options[name]) for name in ("valid_lens", "query_lens") if name in options]
    return options.get("dropout", 0) > 0 or (options.get("causal") == "bottom_right" and 1 in lengths)


@torch.no_grad()
def on_device(inputs, grad_out, mine, sharding, turn, options):
    """The same by what runs on a GPU, where torch moves and merges."""
    inputs = [x.detach() for x in inputs]
    scheme = ("ring", "all_gather", "automatic")[turn % 3]
    call = _on_device.make_call(
        dist.group.WORLD, 60, {"scheme": scheme, "sharding": sharding, **options}, inputs[0].device
    )._replace(staged=turn % 2 == 0)
    out, lse = _on_device.forward(call, *inputs)
    rows = tensor(shards.take(grad_out, mine))
    gradients = _on_device.backward(call, rows, *inputs, out, lse, "bias" in options)
    named = zip(("query", "key", "value", "bias", "sinks"), gradients, strict=True)
    return {"out": out, "lse": lse, **{name: x for name, x in named if x is not None}}


def each_has_one_query(sharding):
    """Then ranks cannot know whether a bias of one row is one for all or one for each."""
    return all(sum(end - begin for begin, end in shard) == 1 for shard in sharding.queries)
