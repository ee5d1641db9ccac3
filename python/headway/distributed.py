"""Attention over a sequence that is split among processes: the rows of each rank, and the estimated time on a cluster.

Sharding                            which rows every rank holds, in the order of its tensors
contiguous, zigzag, balanced        make a Sharding
explain                             scheme, bytes of every link and estimated time; the ranks need not exist
Cluster                             the machines that explain assumes
take, join                          a rank's rows of an array, and the whole from all ranks' rows

headway.torch.distributed.attention and headway.jax.ring_attention compute it.

>>> import headway.distributed as distributed
>>> distributed.zigzag(16, ranks=2).queries
[[(0, 4), (12, 16)], [(4, 12)]]
>>> plan = distributed.explain(distributed.zigzag(16384, ranks=4), heads=16, head_dim=64, causal=True)
>>> plan.scheme, round(plan.imbalance, 3)
('ring', 0.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headway import _headway

__all__ = ["Cluster", "Plan", "Sharding", "balanced", "contiguous", "explain", "join", "take", "zigzag"]

Shards = list[list[tuple[int, int]]]


class Sharding(NamedTuple):
    """The rows [begin, end) of every rank, in the order of its tensors; together they hold every row once.

    >>> Sharding(queries=[[(0, 3)], [(3, 5)]], keys=[[(0, 5)], []]).ranks
    2
    """

    queries: Shards
    keys: Shards

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.queries)


class Cluster(NamedTuple):
    """What explain assumes: bytes and FLOPs per second, times in seconds.

    A rank sends and receives at the same time, each at bandwidth; transfers into or out of a node share node_bandwidth.
    flops are those of a rank, call is the time that a call of an engine takes in addition. handling is the time of the
    rank's own processor for a byte that it sends or receives, in which it does not compute: 0 for accelerators.

    >>> Cluster(ranks_per_node=8, flops=4e14, bandwidth=4e11).latency
    2e-05
    """

    ranks_per_node: int = 1
    flops: float = 5e10
    bandwidth: float = 5e9
    latency: float = 2e-5
    node_bandwidth: float = 12.5e9
    node_latency: float = 2e-5
    call: float = 3e-5
    handling: float = 0.0


class Plan(NamedTuple):
    """What explain found; str() is the readable text. Times are in seconds.

    >>> explain(contiguous(1024, ranks=2), window=(16, 16), scheme="ring").bytes  # K and V of 16 rows each way
    16384.0
    """

    text: str
    scheme: str
    seconds: float
    efficiency: float
    imbalance: float
    bytes: float
    most_bytes: float
    waiting: float

    def __str__(self) -> str:
        """The text."""
        return self.text


def contiguous(
    queries: int | Sequence[int], keys: int | Sequence[int] | None = None, *, ranks: int | None = None
) -> Sharding:
    """Consecutive rows for each rank: the given lengths, else nearly equal ones.

    >>> contiguous(7, ranks=2).keys
    [[(0, 4)], [(4, 7)]]
    >>> contiguous([3, 0], [2, 5]).queries
    [[(0, 3)], []]
    """
    keys = queries if keys is None else keys
    if isinstance(queries, int) and isinstance(keys, int):
        if ranks is None:
            raise ValueError("contiguous: ranks is missing: pass ranks=, or a length for every rank")
        return Sharding(*_headway.distributed_even(queries, keys, ranks))
    if isinstance(queries, int) or isinstance(keys, int):
        raise TypeError("contiguous: expected two whole numbers or two sequences of lengths, found one of each")
    return Sharding(*_headway.distributed_contiguous(list(queries), list(keys)))


def zigzag(queries: int, keys: int | None = None, *, ranks: int) -> Sharding:
    """2 * ranks chunks, of which rank r has chunks r and 2 * ranks - 1 - r: balanced work under a causal mask.

    >>> zigzag(8, ranks=2).queries
    [[(0, 2), (6, 8)], [(2, 6)]]
    """
    return Sharding(*_headway.distributed_zigzag(queries, queries if keys is None else keys, ranks))


def balanced(length: int, *, ranks: int, batch: int = 1, **options: Any) -> Sharding:
    """Nearly the same rows and allowed pairs for every rank, for self-attention with these options of attention.

    Packed sequences need cu_seqlens_q and cu_seqlens_k.

    >>> starts = [0, 100, 350, 1000]
    >>> sharding = balanced(1000, ranks=2, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)
    >>> [sum(end - begin for begin, end in rows) for rows in sharding.queries]
    [500, 500]
    """
    sizes = (batch, 1, 1, length, length, 64, 64, 4)
    return Sharding(*_headway.distributed_balanced(sizes, ranks, **options))


def explain(
    sharding: Sharding,
    *,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    batch: int = 1,
    element_bytes: int = 4,
    scheme: str = "automatic",
    backward: bool = False,
    cluster: Cluster | None = None,
    text: bool = True,
    **options: Any,
) -> Plan:
    """What attention over these shards would do on a cluster: the simulator runs the schedule that attention runs.

    options are attention's: causal, window, valid_lens, query_lens, and cu_seqlens_q and cu_seqlens_k for packed
    sequences. text=False leaves out the text, and with it the comparison with the other schemes.

    >>> plan = explain(contiguous(4096, ranks=4), causal=True, window=(100, None), scheme="ring")
    >>> print(str(plan).splitlines()[0])
    distributed attention: ring, 4 ranks, 2 steps
    """
    if element_bytes not in (2, 4, 8):
        raise ValueError(f"explain: element_bytes is {element_bytes}, expected 2, 4 or 8")
    queries, keys = (sum(end - begin for rows in side for begin, end in rows) for side in sharding)
    sizes = (batch, heads, kv_heads or heads, queries, keys, head_dim, value_dim or head_dim, element_bytes)
    return Plan(
        *_headway.distributed_explain(
            sizes, sharding, scheme=scheme, cluster=cluster, backward=backward, with_text=text, **options
        )
    )


def take(array: Any, rows: Sequence[tuple[int, int]], axis: int = -2) -> Any:
    """The rows that a rank holds: of a torch tensor, a JAX array or a NumPy array.

    >>> take(np.arange(8), [(0, 2), (6, 8)], axis=0)
    array([0, 1, 6, 7])
    """
    index = np.concatenate([np.arange(begin, end) for begin, end in rows] or [np.arange(0)])
    if hasattr(array, "index_select"):
        import torch

        return array.index_select(axis, torch.from_numpy(index).to(array.device))
    return array.take(index, axis)


def join(arrays: Sequence[Any], shards: Shards, axis: int = -2) -> Any:
    """The whole array from the rows of all ranks.

    >>> join([np.array([0, 1, 6, 7]), np.array([2, 3, 4, 5])], [[(0, 2), (6, 8)], [(2, 6)]], axis=0)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    order = np.concatenate([np.arange(begin, end) for rows in shards for begin, end in rows] or [np.arange(0)])
    place = np.argsort(order)
    if hasattr(arrays[0], "index_select"):
        import torch

        whole = torch.cat(list(arrays), dim=axis)
        return whole.index_select(axis, torch.from_numpy(place).to(whole.device))
    return np.concatenate([np.asarray(a) for a in arrays], axis=axis).take(place, axis)
