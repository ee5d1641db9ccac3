"""Attention over a sequence that is split among the processes of a torch.distributed group, with gradients.

Each rank passes its own rows and gets the result for its queries; every rank of the group calls it. gloo carries CPU
tensors, NCCL those on a GPU; a group with gloo alone carries these through host memory.

    import torch.distributed as dist, headway.torch.distributed as context_parallel
    dist.init_process_group("gloo")
    out = context_parallel.attention(query, key, value, dist.group.WORLD, causal=True)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway import _headway
from headway._headway import Mask
from headway.distributed import Cluster, Sharding, join, take
from headway.torch import _on_device
from headway.torch._on_device import LostRank
from headway.torch.functional import Causal, Window, require_tensors
from headway.torch.functional import attention as whole_attention

__all__ = ["Attention", "LostRank", "attention", "join", "take"]

_FIRST_TAG = 18_501_000  # of the messages here, so that they are none of the program's own
_HEAD = 4096  # bytes of the first message of all_gather

# Messages that were under way when a call failed: gloo may still write to their memory.
_abandoned: list[Any] = []


class _Transport:
    """The messages of one call, for the compiled part: begin, wait and all_gather (python/src/distributed.cpp)."""

    def __init__(self, operation: str, group: dist.ProcessGroup, timeout: float) -> None:
        self.operation, self.group, self.timeout = operation, group, timeout
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.peers = [dist.get_global_rank(group, rank) for rank in range(self.ranks)]
        self.sent, self.received = [0] * self.ranks, [0] * self.ranks
        self.pending: list[tuple[Any, int, Any]] = []

    def begin(self, sends: list[Any], receives: list[Any]) -> None:
        for start, messages, counts in ((dist.irecv, receives, self.received), (dist.isend, sends, self.sent)):
            for peer, view, keep in messages:
                self._start(start, torch.frombuffer(view, dtype=torch.uint8), peer, counts, keep)

    def _start(self, start: Any, memory: Tensor, peer: int, counts: list[int], keep: Any) -> None:
        counts[peer] += 1  # messages between two ranks are numbered, so that none is taken for another
        try:
            work = start(memory, self.peers[peer], group=self.group, tag=_FIRST_TAG + counts[peer])
        except RuntimeError as error:
            self._lose(peer, error)
        self.pending.append((work, peer, (memory, keep)))

    def wait(self) -> None:
        end = time.monotonic() + self.timeout
        for work, peer, _ in self.pending:
            left = max(end - time.monotonic(), 0.001)
            try:
                done = work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                self._lose(peer, error)
            if done is False:
                self._lose(peer, None)
        self.pending.clear()

    def _lose(self, peer: int, error: Exception | None) -> NoReturn:
        _abandoned.extend(self.pending)
        self.pending.clear()
        reason = "" if error is None else f" ({str(error).splitlines()[0]})"
        raise LostRank(
            f"{self.operation}: rank {peer} has left or has not answered rank {self.rank} "
            f"for {self.timeout:g} s{reason}"
        ) from error

    def all_gather(self, mine: bytes) -> list[bytes]:
        """One exchange for texts of usual length; what is longer follows."""
        heads = [torch.zeros(_HEAD, dtype=torch.uint8) for _ in range(self.ranks)]
        own = (len(mine).to_bytes(8, "little") + mine)[:_HEAD].ljust(_HEAD)
        heads[self.rank] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self._swap([heads[self.rank]] * self.ranks, heads)
        texts = [bytes(head.numpy()) for head in heads]
        lengths = [8 + int.from_bytes(text[:8], "little") for text in texts]
        more = [torch.empty(max(length - _HEAD, 0), dtype=torch.uint8) for length in lengths]
        if more[self.rank].numel() > 0:
            more[self.rank] = torch.frombuffer(bytearray(mine[_HEAD - 8 :]), dtype=torch.uint8)
        self._swap([more[self.rank]] * self.ranks, more)
        return [(text + bytes(rest.numpy()))[8:length] for text, rest, length in zip(texts, more, lengths, strict=True)]

    def _swap(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        for start, tensors, counts in ((dist.irecv, receives, self.received), (dist.isend, sends, self.sent)):
            for peer, tensor in enumerate(tensors):
                if peer != self.rank and tensor.numel() > 0:
                    self._start(start, tensor, peer, counts, None)
        self.wait()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(query, key, value, bias, sinks)
        ctx.save_for_backward(query, key, value, bias, out, lse, sinks)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, bias, out, lse, sinks = ctx.saved_tensors
        wants_dbias = ctx.needs_input_grad[3]
        return (*ctx.call.backward(grads[0], query, key, value, bias, out, lse, sinks, wants_dbias), None)


class _Call:
    """The arguments of a call beside its tensors."""

    def __init__(self, group: dist.ProcessGroup, timeout: float, keywords: dict[str, Any]) -> None:
        self.group, self.timeout, self.keywords = group, timeout, keywords

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Any:
        if query.is_cuda:
            return _on_device.forward(self._on_device(bias, sinks, query.device), query, key, value)
        transport = _Transport("attention", self.group, self.timeout)
        return _headway.distributed_attention(transport, query, key, value, bias=bias, sinks=sinks, **self.keywords)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        wants_dbias: bool,
    ) -> Any:
        if query.is_cuda:
            call = self._on_device(bias, sinks, query.device)
            return _on_device.backward(call, grad_out, query, key, value, out, lse, wants_dbias)
        transport = _Transport("attention_backward", self.group, self.timeout)
        return _headway.distributed_attention_backward(
            transport, grad_out, query, key, value, out, lse, bias=bias, sinks=sinks, wants_dbias=wants_dbias,
            **self.keywords,
        )  # fmt: skip

    def _on_device(self, bias: Tensor | None, sinks: Tensor | None, device: torch.device) -> _on_device.Call:
        return _on_device.make_call(self.group, self.timeout, {"bias": bias, "sinks": sinks, **self.keywords}, device)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Any = None,
    *,
    sharding: Sharding | None = None,
    scheme: str = "automatic",
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    valid_lens: Any | None = None,
    query_lens: Any | None = None,
    spans: Any | None = None,
    span_rows: int = 1,
    cu_seqlens_q: Any | None = None,
    cu_seqlens_k: Any | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    cluster: Cluster | None = None,
    timeout: float = 60.0,
) -> Any:
    """Attention of this rank's queries to the keys of all ranks, with gradients for query, key, value, bias, sinks.

    query (B, H, Sq_r, D), key (B, Hkv, Sk_r, D), value (B, Hkv, Sk_r, Dv) -> (B, H, Sq_r, Dv), the rows that this rank
    holds; any number of them, also none. With cu_seqlens_q and cu_seqlens_k, bounds of the whole pack, they are
    (total_r, H, D). The result is that of headway.attention on the whole, within the same error bound.

    group       a process group, or a DeviceMesh with one axis; the default group when absent
    sharding    which rows every rank holds (headway.distributed.zigzag, balanced); rank after rank when absent
    scheme      "ring", "all_gather", "heads", "pass_query", or "hybrid": heads inside groups of ranks, a ring across
                groups; "automatic" takes the one with the least estimated time
    mask, bias  broadcast to (B, H, Sq_r, all keys), packed to (B, H, longest query, longest key). A bias that repeats
                over queries, and a packed one, gets the gradient of all ranks' rows on every rank.
    All other options, structured masks (headway.masks) among them, are of the whole sequence and must be the same on
    every rank: what differs is a ValueError that names it, on every rank. dropout needs the seed, and drops what it
    drops on one process with that seed.
    timeout     seconds to wait for another rank; then LostRank

    On a GPU there are the schemes ring and all_gather, and neither dropout nor packed sequences yet, nor lengths of
    batch items with causal="bottom_right". A rank that stalls after the call has begun is found by NCCL's own timeout;
    over gloo it is a LostRank as on the CPU.

    DTensors work too: along axes of the mesh that shard batch or heads nothing is sent; along one that shards the
    sequence (contiguously, as DTensors are) the schedule runs.

    >>> import tempfile, torch, torch.distributed as dist
    >>> from headway.torch.distributed import attention
    >>> store = "file://" + tempfile.mktemp()
    >>> dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)  # torchrun gives rank and world_size
    >>> query, key, value = torch.randn(3, 1, 8, 16, 64)  # the rows of this rank
    >>> attention(query, key, value, causal="top_left").shape
    torch.Size([1, 8, 16, 64])
    >>> dist.destroy_process_group()
    """
    if _is_dtensor(query):
        return _attention_of_dtensors(query, key, value, group, sharding, return_lse, dict(
            scheme=scheme, mask=mask, bias=bias, causal=causal, window=window, valid_lens=valid_lens,
            query_lens=query_lens, spans=spans, span_rows=span_rows, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            dropout=dropout, seed=seed, cluster=cluster, timeout=timeout,
        ))  # fmt: skip
    require_tensors("attention", ("query", query), ("key", key), ("value", value))
    given = {
        "sharding": sharding, "scheme": scheme, "mask": mask, "window": window, "valid_lens": valid_lens,
        "query_lens": query_lens, "spans": spans, "span_rows": span_rows, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes,
        "dropout": dropout, "seed": seed, "cluster": cluster,
    }  # fmt: skip
    keywords = {name: value for name, value in given.items() if value is not None}
    keywords["causal"] = causal
    call = _Call(_group_of(group, query.device), timeout, keywords)
    apply: Any = _Attention.apply
    out, lse = apply(query, key, value, bias, sinks, call)
    return (out, lse) if return_lse else out


def _group_of(group: Any, device: torch.device) -> dist.ProcessGroup:
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError("attention: there is no process group: call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) and hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(f"attention: the mesh has {group.ndim} axes, expected one: pass mesh['name']")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"attention: group is a {type(group).__name__}, expected a ProcessGroup or a DeviceMesh")
    backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    carriers = ("cuda:nccl", "cpu:gloo") if device.type == "cuda" else ("cpu:",)
    if not any(carrier in backends for carrier in carriers):
        expected = "nccl or gloo" if device.type == "cuda" else "gloo"
        raise ValueError(f"attention: the tensors are on {device}, expected a group with {expected}, found {backends}")
    return group


# ---- DTensor ----

# Options that belong to batch items or heads, which DTensors would have to split too.
_OF_ITEMS = (
    "mask", "bias", "valid_lens", "query_lens", "spans", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


def _is_dtensor(x: Any) -> bool:
    return type(x).__name__ == "DTensor"  # without importing what torch imports lazily


def _attention_of_dtensors(
    query: Any, key: Any, value: Any, group: Any, sharding: Any, return_lse: bool, options: dict[str, Any]
) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, placements = query.device_mesh, query.placements
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, DTensor) or x.device_mesh != mesh or x.placements != placements:
            raise ValueError(f"attention: {name} must be a DTensor on the query's mesh, placed as {placements}")
    if group is not None or sharding is not None:
        raise ValueError("attention: DTensors bring their group and shards, found group= or sharding= beside them")
    sequence = [axis for axis, one in enumerate(placements) if one == Shard(query.dim() - 2)]
    others = [one for axis, one in enumerate(placements) if axis not in sequence and one != Replicate()]
    if len(sequence) > 1 or any(one not in (Shard(0), Shard(1)) or query.dim() < 4 for one in others):
        raise ValueError(
            f"attention: query is placed as {placements}, expected Shard over batch, heads or sequence, and one axis "
            "of the mesh at most for the sequence"
        )
    given = {name: x for name, x in options.items() if x is not None}
    if others and (given["dropout"] > 0 or any(name in given for name in _OF_ITEMS)):
        raise NotImplementedError(
            "attention: dropout and options of batch items or heads are not split with DTensors yet"
        )
    local = [x.to_local() for x in (query, key, value)]
    if sequence:
        found = attention(local[0], local[1], local[2], mesh.get_group(sequence[0]), return_lse=True, **given)
    else:
        for name in ("scheme", "cluster", "timeout"):
            given.pop(name, None)
        found = whole_attention(*local, return_lse=True, **given)

    def placed(x: Tensor, shape: tuple[int, ...]) -> Any:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    rows = tuple(query.shape[:-1])
    out = placed(found[0], (*rows, value.shape[-1]))
    return (out, placed(found[1], rows)) if return_lse else out


class Attention(nn.Module):
    """attention as a module: the group and the options are given once.

    >>> from headway.torch.distributed import Attention
    >>> Attention(causal=True, scheme="ring")
    Attention(causal=True, scheme='ring')
    """

    def __init__(self, group: Any = None, **options: Any) -> None:
        super().__init__()
        self.group, self.options = group, options

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        """This rank's rows; see attention."""
        return attention(query, key, value, self.group, **self.options)
