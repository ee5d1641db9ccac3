"""The schedule of a split sequence run by torch, for tensors on a GPU (schemes ring and all_gather).

Rows travel by the group's own sends and receives (NCCL), while the engine computes parts on the current stream. Parts
are computed in the inputs' type; what is merged, summed and sent home is float32 (float64 for float64). Nothing here
depends on the device: the tests run it on the CPU with gloo.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from headway import _headway
from headway.distributed import Cluster, Sharding, contiguous, explain

Rows = tuple[int, int]

_SCHEMES = ("all_gather", "ring")
_OPTIONS = ("causal", "window", "valid_lens", "scale", "softcap", "alibi_slopes")


class LostRank(RuntimeError):
    """A rank that failed, left, or did not answer in time.

    >>> from headway.torch.distributed import LostRank
    >>> try:
    ...     raise LostRank("attention: rank 2 has not answered rank 1 for 60 s")
    ... except LostRank as error:
    ...     print(error)
    attention: rank 2 has not answered rank 1 for 60 s
    """

    __module__ = "headway.torch.distributed"


class Call(NamedTuple):
    """The arguments besides tensors, which are the same on every rank."""

    group: dist.ProcessGroup
    timeout: float
    sharding: Sharding | None
    scheme: str
    cluster: Cluster | None
    options: dict[str, Any]  # those of _OPTIONS that are given


def make_call(group: dist.ProcessGroup, timeout: float, keywords: dict[str, Any]) -> Call:
    """NotImplementedError for options that are only supported in host memory so far."""
    given = {name: x for name, x in keywords.items() if x is not None}
    sharding, cluster, scheme = given.pop("sharding", None), given.pop("cluster", None), given.pop("scheme")
    for name, default in (("causal", False), ("dropout", 0.0), ("span_rows", 1)):
        if given.get(name) == default:
            given.pop(name, None)
    unknown = [name for name in given if name not in _OPTIONS]
    if unknown:
        raise NotImplementedError(
            f"attention: {unknown[0]} over a split sequence works in host memory, and not on a GPU yet"
        )
    if scheme not in ("automatic", *_SCHEMES):
        raise NotImplementedError(f"attention: scheme {scheme!r} works in host memory; a GPU has ring and all_gather")
    if "valid_lens" in given and given.get("causal") == "bottom_right":
        raise NotImplementedError("attention: valid_lens with causal='bottom_right' works in host memory, not on a GPU")
    return Call(group, timeout, sharding, scheme, cluster, given)


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


def _plain(x: Any) -> Any:
    return x.tolist() if isinstance(x, Tensor) else list(x) if isinstance(x, (tuple, list)) else x


def _agreed(call: Call, operation: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Sharding, tuple[int, ...]]:
    """The shards and the sizes of the whole; the same error on every rank if arguments differ or one is wrong."""
    error = _own_error(query, key, value)
    facts: dict[str, Any] = {} if error else {
        "the type": str(query.dtype), "batch": query.shape[0], "the number of heads": query.shape[1],
        "the number of kv heads": key.shape[1], "head_dim": query.shape[3], "value_dim": value.shape[3],
        "the scheme": call.scheme, "the sharding": call.sharding, "the cluster": call.cluster,
        **{name: _plain(call.options.get(name)) for name in _OPTIONS},
    }  # fmt: skip
    lengths = [0, 0] if error else [query.shape[2], key.shape[2]]
    texts = _gathered(call, query.device, json.dumps([error, facts, lengths]).encode())
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
    queries, keys = ([lengths[side] for _, _, lengths in ranks] for side in (0, 1))
    sharding = call.sharding or contiguous(queries, keys)
    for rank, (of_queries, of_keys) in enumerate(zip(*sharding, strict=True)):
        if (_count(of_queries), _count(of_keys)) != (queries[rank], keys[rank]):
            raise ValueError(
                f"{operation}: rank {rank} brings {queries[rank]} queries and {keys[rank]} keys, its shard has "
                f"{_count(of_queries)} and {_count(of_keys)}"
            )
    batch, heads, _, width = query.shape
    whole = (batch, heads, key.shape[1], sum(queries), sum(keys), width, value.shape[3], query.element_size())
    return sharding, whole


def _own_error(query: Tensor, key: Tensor, value: Tensor) -> str:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            return f"{name} has {x.dim()} axes, expected (B, H, S, D)"
        if x.dtype != query.dtype or x.device != query.device:
            return f"{name} is {x.dtype} on {x.device}, query is {query.dtype} on {query.device}"
    if key.shape[:3] != value.shape[:3] or key.shape[3] != query.shape[3] or key.shape[0] != query.shape[0]:
        return f"key and value have shapes {tuple(key.shape)} and {tuple(value.shape)}, query has {tuple(query.shape)}"
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        return f"query has {query.shape[1]} heads, expected a multiple of the key's {key.shape[1]}"
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
        self.peers = [dist.get_global_rank(call.group, rank) for rank in range(dist.get_world_size(call.group))]
        self.sharding, self.sizes = _agreed(call, operation, query, key, value)
        self.queries, self.keys = self.sharding.queries[self.rank], self.sharding.keys[self.rank]
        seen = {name: x for name, x in call.options.items() if name in ("causal", "window", "valid_lens")}
        if "valid_lens" in seen:
            seen["valid_lens"] = _plain(seen["valid_lens"])
        self.steps, self.transfers, self.tiles = _headway.distributed_schedule(
            self.sizes, self.sharding, self.rank, scheme=self._scheme(seen, backward), backward=backward, **seen
        )
        self.own_key, self.own_value = _shard_store(self.keys, key), _shard_store(self.keys, value)
        self.arrived: _Store = _Store()  # K and V side by side
        self.tags = [[0] * len(self.peers) for _ in range(2)]

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

    def part_options(self, keys: Rows) -> dict[str, Any]:
        """The options of a part with these keys."""
        options = dict(self.call.options)
        if options.get("causal"):
            options["causal"] = "top_left"  # the offset says how the whole is aligned
        if "valid_lens" in options:
            lens = torch.as_tensor(options["valid_lens"], device=self.query.device)
            options["valid_lens"] = (lens - keys[0]).clamp(0, keys[1] - keys[0])
        return options

    def offset(self, queries: Rows, keys: Rows) -> int:
        """The position of query 0 of a part among its keys."""
        at_start = self.call.options.get("causal") in (True, "square", "top_left")
        return queries[0] - keys[0] + (0 if at_start else self.sizes[4] - self.sizes[3])

    def query_rows(self, tensor: Tensor, rows: Rows) -> Tensor:
        """Of a tensor with this rank's queries along axis 2."""
        at = 0
        for begin, end in self.queries:
            if begin <= rows[0] and rows[1] <= end:
                return tensor.narrow(2, at + rows[0] - begin, rows[1] - rows[0])
            at += end - begin
        raise AssertionError(rows)

    def keys_of(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """K and V of rows on this rank: its own, or those of this step."""
        width = self.key.shape[3]
        key, value = _Store(), _Store()
        for begin, end, memory in self.arrived.pieces:
            key.add((begin, end), memory[..., :width])
            value.add((begin, end), memory[..., width:])
        return _joined((self.own_key, key), rows), _joined((self.own_value, value), rows)

    def begin(self, step: int, gradients: _Store | None = None) -> tuple[Any, _Store, list[tuple[Rows, Tensor]]]:
        """Starts the transfers of the next step's rows, and of the gradients of the last step's.

        Returns what to wait for, the rows that come, and the gradients that come home, in the schedule's order.
        """
        wide = _wide_type(self.query)
        batch, _, kv_heads, _, _, width, value_width, _ = self.sizes
        coming, home, operations = _Store(), [], []
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
                    operations.append(self._message(dist.isend, memory, target))
                else:
                    shape = (batch, kv_heads, end - begin, width + value_width)
                    memory = self.query.new_empty(shape, dtype=wide if is_result else self.query.dtype)
                    operations.append(self._message(dist.irecv, memory, source))
                    if is_result:
                        home.append((rows, memory))
                    else:
                        coming.add(rows, memory)
        return dist.batch_isend_irecv(operations) if operations else [], coming, home

    def _message(self, start: Any, memory: Tensor, peer: int) -> Any:
        """NCCL keeps the order of messages between two ranks; gloo goes by tags."""
        tags = self.tags[start is dist.irecv]
        tags[peer] += 1
        return dist.P2POp(start, memory, self.peers[peer], self.call.group, tags[peer])

    def end(self, works: Any) -> None:
        """With NCCL the current stream waits; the host does not."""
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise LostRank(f"attention: a rank has left ({str(error).splitlines()[0]})") from error


def _wide_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the results of two parts of the keys."""
    total = torch.logaddexp(lse, more_lse)  # -inf where neither part has a key
    safe = torch.where(total.isneginf(), 0, total)
    return out * (lse - safe).exp().unsqueeze(-1) + more * (more_lse - safe).exp().unsqueeze(-1), total


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries."""
    run = _Run(call, "attention", query, key, value)
    wide = _wide_type(query)
    parts: dict[Rows, tuple[Tensor, Tensor]] = {}
    for step in range(run.steps):
        works, coming, _ = run.begin(step)
        for when, queries, keys in run.tiles:
            if when == step:
                found = _headway.distributed_part(
                    run.query_rows(query, queries), *run.keys_of(keys), run.offset(queries, keys),
                    **run.part_options(keys),
                )  # fmt: skip
                before = parts.get(queries)
                if before is None:
                    parts[queries] = found
                else:
                    parts[queries] = _merged(before[0].to(wide), before[1], found[0].to(wide), found[1])
        run.end(works)
        run.arrived = coming
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    lse = query.new_full(query.shape[:3], float("-inf"), dtype=wide)
    for queries, (of_rows, lse_of_rows) in parts.items():
        run.query_rows(out, queries).copy_(of_rows)
        run.query_rows(lse.unsqueeze(3), queries).copy_(lse_of_rows.unsqueeze(3))
    return out, lse


def backward(
    call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's rows."""
    run = _Run(call, "attention_backward", query, key, value, backward=True)
    wide, width = _wide_type(query), key.shape[3]
    d_query = torch.zeros_like(query, dtype=wide)
    d_own = key.new_zeros((*key.shape[:3], width + value.shape[3]), dtype=wide)
    own = _shard_store(run.keys, d_own)
    gradients = _Store()  # of the rows that came for this step
    for step in range(run.steps):
        works, coming, home = run.begin(step, gradients)
        gradients = _Store()
        for begin, end, memory in run.arrived.pieces:
            gradients.add((begin, end), torch.zeros_like(memory, dtype=wide))
        for when, queries, keys in run.tiles:
            if when == step:
                rows = [run.query_rows(x, queries) for x in (grad_out, query, out)]
                dq, dk, dv = _headway.distributed_part_backward(
                    rows[0], rows[1], *run.keys_of(keys), rows[2],
                    run.query_rows(lse.unsqueeze(3), queries).squeeze(3).contiguous(), run.offset(queries, keys),
                    **run.part_options(keys),
                )  # fmt: skip
                run.query_rows(d_query, queries).add_(dq)
                for store in (own, gradients):
                    for (begin, end), sums in store.parts(keys):
                        sums[..., :width].add_(dk.narrow(2, begin - keys[0], end - begin))
                        sums[..., width:].add_(dv.narrow(2, begin - keys[0], end - begin))
        run.end(works)
        for rows_home, memory in home:
            for (begin, end), sums in own.parts(rows_home):
                sums.add_(memory.narrow(2, begin - rows_home[0], end - begin))
        run.arrived = coming
    dtype = query.dtype
    return d_query.to(dtype), d_own[..., :width].to(dtype), d_own[..., width:].to(dtype)
