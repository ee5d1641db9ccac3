"""The schedule of a split sequence run by torch, for tensors on a GPU (schemes ring and all_gather).

Rows travel by the group's own sends and receives (NCCL) or through host memory (gloo), while the engine computes parts
on the current stream. Parts are computed in the inputs' type; what is merged, summed and sent home is float32 (float64
for float64). Nothing here depends on the device: the tests run it on the CPU with gloo.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from headway import _headway
from headway._headway import Mask
from headway.distributed import Cluster, Sharding, contiguous, explain
from headway.torch._messages import Direct, LostRank, Staged, needs_host_memory
from headway.torch._split_options import SHARED, Rows, SplitOptions, fact, refuse_unsupported

__all__ = ["Call", "LostRank", "backward", "forward", "make_call"]

_SCHEMES = ("all_gather", "ring")


class Call(NamedTuple):
    """The arguments besides query, key and value."""

    group: dist.ProcessGroup
    timeout: float
    sharding: Sharding | None
    scheme: str
    cluster: Cluster | None
    options: dict[str, Any]  # attention's, where they are given
    staged: bool  # rows travel through host memory


def make_call(group: dist.ProcessGroup, timeout: float, keywords: dict[str, Any], device: torch.device) -> Call:
    """NotImplementedError for options that are only supported in host memory so far."""
    given = {name: x for name, x in keywords.items() if x is not None}
    sharding, cluster, scheme = given.pop("sharding", None), given.pop("cluster", None), given.pop("scheme")
    for name, default in (("causal", False), ("dropout", 0.0), ("span_rows", 1)):
        if given.get(name) == default:
            given.pop(name, None)
    refuse_unsupported(given)
    if scheme not in ("automatic", *_SCHEMES):
        raise NotImplementedError(f"attention: scheme {scheme!r} works in host memory; a GPU has ring and all_gather")
    return Call(group, timeout, sharding, scheme, cluster, given, needs_host_memory(group, device))


# ---- Agreement ----


def _gathered(call: Call, device: torch.device, mine: bytes) -> list[bytes]:
    """The texts of all ranks."""
    ranks = dist.get_world_size(call.group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    own = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    _finish(call, dist.all_gather(lengths, own, group=call.group, async_op=True))
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(padded) for _ in range(ranks)]
    _finish(call, dist.all_gather(texts, padded, group=call.group, async_op=True))
    return [bytes(text.cpu().numpy())[: int(length)] for text, length in zip(texts, lengths, strict=True)]


def _finish(call: Call, work: Any) -> None:
    """Waits on the host, so that a rank that does not join is an error here and not a stream that never ends."""
    end = time.monotonic() + call.timeout
    while not work.is_completed():
        if time.monotonic() > end:
            rank = dist.get_rank(call.group)
            raise LostRank(f"attention: some rank has left or has not answered rank {rank} for {call.timeout:g} s")
        time.sleep(0.00005)
    try:
        work.wait()
    except RuntimeError as error:
        raise LostRank(f"attention: some rank has left ({str(error).splitlines()[0]})") from error


def _summed(call: Call, mine: Tensor) -> Tensor:
    """The sum over ranks, in their order: the same bits on all of them."""
    device = torch.device("cpu") if call.staged else mine.device
    host = mine.detach().cpu().contiguous()
    total = torch.zeros(host.numel(), dtype=torch.float64)
    for text in _gathered(call, device, host.numpy().tobytes()):
        total += torch.frombuffer(bytearray(text), dtype=host.dtype)
    return total.reshape(mine.shape).to(mine)


def _agreed(
    call: Call, operation: str, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Sharding, tuple[int, ...], bool]:
    """The shards, the sizes of the whole, and whether all ranks bring the same bias; the same error on every rank if
    arguments differ or one is wrong."""
    error = _own_error(call.options, query, key, value)
    mask, bias = call.options.get("mask"), call.options.get("bias")
    facts: dict[str, Any] = {} if error else {
        "the type": str(query.dtype), "batch": query.shape[0], "the number of heads": query.shape[1],
        "the number of kv heads": key.shape[1], "head_dim": query.shape[3], "value_dim": value.shape[3],
        "the scheme": call.scheme, "the sharding": call.sharding, "the cluster": call.cluster,
        **{name: fact(call.options.get(name)) for name in SHARED},
        "mask": fact(mask) if isinstance(mask, Mask) else mask is not None, "bias": bias is not None,
    }  # fmt: skip
    bias_rows = 1 if bias is None or bias.dim() < 2 else bias.shape[-2]
    lengths = [0, 0, 1] if error else [query.shape[2], key.shape[2], bias_rows]
    device = torch.device("cpu") if call.staged else query.device
    texts = _gathered(call, device, json.dumps([error, facts, lengths]).encode())
    ranks = [json.loads(text) for text in texts]
    for rank, (error, _, _) in enumerate(ranks):
        if error:
            raise ValueError(f"{operation}: rank {rank}: {error}")
    for name, first in ranks[0][1].items():
        for rank, (_, others, _) in enumerate(ranks):
            if others[name] != first:
                raise ValueError(
                    f"{operation}: {name} is {first} on rank 0 and {others[name]} on rank {rank}, expected the same on "
                    "all ranks"
                )
    queries, keys, rows = ([lengths[side] for _, _, lengths in ranks] for side in (0, 1, 2))
    sharding = call.sharding or contiguous(queries, keys)
    for rank, (of_queries, of_keys) in enumerate(zip(*sharding, strict=True)):
        if (_count(of_queries), _count(of_keys)) != (queries[rank], keys[rank]):
            raise ValueError(
                f"{operation}: rank {rank} brings {queries[rank]} queries and {keys[rank]} keys, its shard has "
                f"{_count(of_queries)} and {_count(of_keys)}"
            )
    batch, heads, _, width = query.shape
    whole = (batch, heads, key.shape[1], sum(queries), sum(keys), width, value.shape[3], query.element_size())
    # If every rank has one query, a row of a bias is taken for its own.
    return sharding, whole, all(n == 1 for n in rows) and any(n != 1 for n in queries)


def _own_error(options: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> str:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            return f"{name} has {x.dim()} axes, expected (B, H, S, D)"
        if x.dtype != query.dtype or x.device != query.device:
            return f"{name} is {x.dtype} on {x.device}, query is {query.dtype} on {query.device}"
    if key.shape[:3] != value.shape[:3] or key.shape[3] != query.shape[3] or key.shape[0] != query.shape[0]:
        return f"key and value have shapes {tuple(key.shape)} and {tuple(value.shape)}, query has {tuple(query.shape)}"
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        return f"query has {query.shape[1]} heads, expected a multiple of the key's {key.shape[1]}"
    for name in ("mask", "bias"):
        matrix = options.get(name)
        if isinstance(matrix, Tensor) and matrix.dim() > 1 and matrix.shape[-2] not in (1, query.shape[2]):
            return f"{name} has {matrix.shape[-2]} rows, expected those of this rank's {query.shape[2]} queries, or 1"
    return ""


def _count(shard: Iterable[Rows]) -> int:
    return sum(end - begin for begin, end in shard)


# ---- Rows ----


class _Store:
    """Rows of the whole sequence, (B, H, rows, columns), in pieces."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, Tensor]] = []

    def add(self, rows: Rows, memory: Tensor) -> None:
        self.pieces.append((*rows, memory))
        self.pieces.sort(key=lambda piece: piece[0])

    def parts(self, rows: Rows) -> list[tuple[Rows, Tensor]]:
        """Views of the rows on this rank, piece by piece."""
        found = []
        for begin, end, memory in self.pieces:
            first, last = max(begin, rows[0]), min(end, rows[1])
            if first < last:
                found.append(((first, last), memory.narrow(2, first - begin, last - first)))
        return found


def _shard_store(shard: Iterable[Rows], tensor: Tensor) -> _Store:
    """A rank's own rows, as views of its tensor."""
    store, at = _Store(), 0
    for begin, end in shard:
        store.add((begin, end), tensor.narrow(2, at, end - begin))
        at += end - begin
    return store


def _joined(stores: Iterable[_Store], rows: Rows) -> Tensor:
    """Rows from several pieces as one tensor."""
    parts = sorted((part for store in stores for part in store.parts(rows)), key=lambda part: part[0])
    assert sum(end - begin for (begin, end), _ in parts) == rows[1] - rows[0]
    return parts[0][1] if len(parts) == 1 else torch.cat([memory for _, memory in parts], dim=2)


# ---- One rank's run of the schedule ----


class _Run:
    def __init__(
        self, call: Call, operation: str, query: Tensor, key: Tensor, value: Tensor, backward: bool = False
    ) -> None:
        self.call, self.query, self.key, self.value = call, query, key, value
        self.rank = dist.get_rank(call.group)
        self.sharding, self.sizes, self.bias_is_shared = _agreed(call, operation, query, key, value)
        self.queries, self.keys = self.sharding.queries[self.rank], self.sharding.keys[self.rank]
        self.options = SplitOptions(call.options, self.queries, self.sizes, query.device)
        seen = self.options.seen()
        self.steps, self.transfers, self.tiles = _headway.distributed_schedule(
            self.sizes, self.sharding, self.rank, scheme=self._scheme(seen, backward), backward=backward, **seen
        )
        self.own_key, self.own_value = _shard_store(self.keys, key), _shard_store(self.keys, value)
        self.arrived: _Store = _Store()  # K and V side by side
        to_peers = (call.group, call.timeout)
        self.messages: Direct = Staged(*to_peers, query.device) if call.staged else Direct(*to_peers)

    def _scheme(self, seen: dict[str, Any], backward: bool) -> str:
        if self.call.scheme != "automatic":
            return self.call.scheme
        batch, heads, kv_heads, _, _, width, value_width, element = self.sizes

        def seconds(scheme: str) -> float:
            return explain(
                self.sharding, heads=heads, kv_heads=kv_heads, head_dim=width, value_dim=value_width, batch=batch,
                element_bytes=element, scheme=scheme, backward=backward, cluster=self.call.cluster, text=False, **seen,
            ).seconds  # fmt: skip

        return min(_SCHEMES, key=seconds)

    def offset(self, queries: Rows, keys: Rows) -> int:
        """The position of query 0 of a part among its keys."""
        at_start = self.call.options.get("causal") in (True, "square", "top_left")
        return queries[0] - keys[0] + (0 if at_start else self.sizes[4] - self.sizes[3])

    def keys_of(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """K and V of rows on this rank: its own, or those of this step."""
        width = self.key.shape[3]
        key, value = _Store(), _Store()
        for begin, end, memory in self.arrived.pieces:
            key.add((begin, end), memory[..., :width])
            value.add((begin, end), memory[..., width:])
        return _joined((self.own_key, key), rows), _joined((self.own_value, value), rows)

    def begin(self, step: int, gradients: _Store | None = None) -> tuple[_Store, list[tuple[Rows, Tensor]]]:
        """Starts the transfers of the next step's rows, and of the gradients of the last step's.

        Returns the rows that come, and the gradients that come home, in the schedule's order.
        """
        wide = _wide_type(self.query)
        batch, _, kv_heads, _, _, width, value_width, _ = self.sizes
        coming, home, sends, receives = _Store(), [], [], []
        with self.messages.beside():
            for is_result in (False, True):
                for when, source, target, begin, end, result in self.transfers:
                    if result != is_result or when != (step if result else step + 1):
                        continue
                    rows = (begin, end)
                    if source == self.rank:
                        if is_result:
                            assert gradients is not None
                            memory = _joined((gradients,), rows).contiguous()
                        else:
                            memory = torch.cat(self.keys_of(rows), dim=3)
                        sends.append((memory, target))
                        continue
                    shape = (batch, kv_heads, end - begin, width + value_width)
                    memory = self.query.new_empty(shape, dtype=wide if is_result else self.query.dtype)
                    receives.append((memory, source))
                    if is_result:
                        home.append((rows, memory))
                    else:
                        coming.add(rows, memory)
            self.messages.begin(sends, receives)
        return coming, home


def _wide_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Merge:
    """Sums of the parts of one range of queries.

    In a part, a row may have scores of -inf only (from infinite inputs), and then a lse of NaN, while other parts have
    finite scores, beside which these weigh 0. Such rows are taken for that at first, and looked at a step later, so
    that the host does not wait for the work that it has just queued.
    """

    def __init__(self, wide: torch.dtype) -> None:
        self.wide, self.lowest = wide, torch.finfo(wide).min
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> Tensor:
        """Returns which rows of the part are NaN."""
        undefined = lse.isnan()
        out = out.to(self.wide).masked_fill(undefined.unsqueeze(-1), 0)
        lse = lse.masked_fill(undefined, self.lowest)
        if self.out is None or self.lse is None:
            self.out, self.lse = out, lse
            return undefined
        total = torch.logaddexp(self.lse, lse)  # -inf where neither part has a key
        safe = torch.where(total.isneginf(), 0, total)
        self.out = self.out * (self.lse - safe).exp().unsqueeze(-1) + out * (lse - safe).exp().unsqueeze(-1)
        self.lse = total
        return undefined

    def spoil(self, rows: Tensor) -> None:
        """These rows are NaN after all."""
        assert self.lse is not None
        self.lse = self.lse.masked_fill(rows, float("nan"))

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out and lse, beside the scores of the rows' sinks."""
        assert self.out is not None and self.lse is not None
        out, lse = self.out, self.lse
        if sinks is not None:
            lse = torch.logaddexp(self.lse, sinks)
            safe = torch.where(lse.isneginf(), 0, lse)
            out = out * (self.lse - safe).exp().unsqueeze(-1)
        undefined = lse.isnan() | (lse == self.lowest)  # also where all parts had scores of -inf only
        return out.masked_fill(undefined.unsqueeze(-1), float("nan")), lse.masked_fill(undefined, float("nan"))


class _Doubt(NamedTuple):
    """A part with rows that may be NaN."""

    merge: _Merge
    rows: Tensor
    inputs: tuple[Any, ...]
    options: dict[str, Any]

    def settle(self) -> None:
        """Beside the finite score of a sink, rows of -inf alone are finite; NaN and +inf still give NaN."""
        if bool(self.rows.any()):
            sinks = torch.zeros(self.rows.shape[1], device=self.rows.device)
            _, lse = _headway.distributed_part(*self.inputs, sinks=sinks, **self.options)
            self.merge.spoil(self.rows & lse.isnan())


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries."""
    run = _Run(call, "attention", query, key, value)
    wide = _wide_type(query)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    lse = query.new_full(query.shape[:3], float("-inf"), dtype=wide)
    sinks = None if run.options.sinks is None else run.options.sink_scores(lse)
    if sinks is not None:
        lse.copy_(sinks)  # of rows without keys

    def store(queries: Rows, of_rows: Tensor, lse_of_rows: Tensor) -> None:
        run.options.own_rows(out, queries).copy_(of_rows)
        run.options.own_rows(lse.unsqueeze(3), queries).copy_(lse_of_rows.unsqueeze(3))

    number = Counter(queries for _, queries, _ in run.tiles)
    merges = {queries: _Merge(wide) for queries, parts in number.items() if parts > 1 or sinks is not None}
    doubts: list[_Doubt] = []  # of the step before
    for step in range(run.steps):
        coming, _ = run.begin(step)
        new_doubts = []
        for when, queries, keys in run.tiles:
            if when == step:
                inputs = (run.options.own_rows(query, queries), *run.keys_of(keys), run.offset(queries, keys))
                options = run.options.of_part(queries, keys)
                found = _headway.distributed_part(*inputs, **options)
                if queries in merges:
                    undefined = merges[queries].add(*found)
                    new_doubts.append(_Doubt(merges[queries], undefined, inputs, options))
                else:
                    store(queries, *found)
        run.messages.flush()
        for doubt in doubts:
            doubt.settle()
        doubts = new_doubts
        run.messages.end()
        run.arrived = coming
    for doubt in doubts:
        doubt.settle()
    for queries, merge in merges.items():
        rows = None if sinks is None else run.options.own_rows(sinks.unsqueeze(3), queries).squeeze(3)
        store(queries, *merge.finish(rows))
    return out, lse


def backward(
    call: Call,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    wants_dbias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of this rank's rows; that of the bias, and of the sinks over all ranks, where there are some."""
    run = _Run(call, "attention_backward", query, key, value, backward=True)
    wide, width = _wide_type(query), key.shape[3]
    d_query = torch.zeros_like(query, dtype=wide)
    d_own = key.new_zeros((*key.shape[:3], width + value.shape[3]), dtype=wide)
    own = _shard_store(run.keys, d_own)
    bias = run.options.arrays.get("bias") if wants_dbias else None
    d_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
    gradients = _Store()  # of the rows that came for this step
    for step in range(run.steps):
        coming, home = run.begin(step, gradients)
        gradients = _Store()
        for begin, end, memory in run.arrived.pieces:
            gradients.add((begin, end), torch.zeros_like(memory, dtype=wide))
        for when, queries, keys in run.tiles:
            if when == step:
                rows = [run.options.own_rows(x, queries) for x in (grad_out, query, out)]
                options = run.options.of_part(queries, keys)
                if d_bias is not None:
                    options["bias"] = options["bias"].to(wide)  # so that its sums are
                dq, dk, dv, db = _headway.distributed_part_backward(
                    rows[0], rows[1], *run.keys_of(keys), rows[2],
                    run.options.own_rows(lse.unsqueeze(3), queries).squeeze(3).contiguous(), run.offset(queries, keys),
                    wants_dbias=d_bias is not None, **options,
                )  # fmt: skip
                if d_bias is not None:
                    run.options.columns(run.options.own_rows(d_bias, queries), keys).add_(db)
                run.options.own_rows(d_query, queries).add_(dq)
                for store in (own, gradients):
                    for (begin, end), sums in store.parts(keys):
                        sums[..., :width].add_(dk.narrow(2, begin - keys[0], end - begin))
                        sums[..., width:].add_(dv.narrow(2, begin - keys[0], end - begin))
        run.messages.flush()
        run.messages.end()
        for rows_home, memory in home:
            for (begin, end), sums in own.parts(rows_home):
                sums.add_(memory.narrow(2, begin - rows_home[0], end - begin))
        run.arrived = coming
    dtype = query.dtype
    gradients_of_rows = d_query.to(dtype), d_own[..., :width].to(dtype), d_own[..., width:].to(dtype)
    if d_bias is not None:
        given = call.options["bias"]
        d_bias = (_summed(call, d_bias) if run.bias_is_shared else d_bias).reshape(given.shape).to(given.dtype)
    return (*gradients_of_rows, d_bias, _sink_gradients(run, grad_out, out, lse))


def _sink_gradients(run: _Run, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor | None:
    if run.options.sinks is None:
        return None
    share = torch.where(lse.isneginf(), 0, (run.options.sink_scores(lse) - lse).exp())
    change = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    mine = -torch.where(share == 0, 0, share * change).sum((0, 2))
    return _summed(run.call, mine).to(run.options.sinks.dtype)
