"""Sharded arrays under jit: batch items and heads are computed where they lie.

XLA knows nothing about a foreign call, and would gather its operands on every device. Here it learns that batch items
and kv heads (with their query heads) are independent, while sequences and features must be whole. Sharded sequences
are headway.jax.ring_attention's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import custom_partitioning as partitioning
from jax.sharding import NamedSharding

if TYPE_CHECKING:
    from headway.jax._call import Static

custom_partitioning: Any = partitioning.custom_partitioning  # these have no annotations
PartitionSpec: Any = jax.sharding.PartitionSpec
ShapeDtype: Any = jax.ShapeDtypeStruct

Plain = Callable[..., Any]  # (*operands, shapes of the results) -> results

# The batch and head axes of arrays that have both, heads before positions.
_BATCHED = ("grad_out", "query", "key", "value", "out", "lse", "mask", "bias", "spans", "weights")
_POSITIONED = ("grad_out", "query", "key", "value", "out")  # (B, S, H, D) in that layout
_PER_HEAD = ("alibi_slopes", "sinks")
_PER_BATCH = ("valid_lens", "query_lens")


# Versions of JAX that cannot be told what must be whole gather the operands, as before.
_CAN_TELL = "need_replication_factors" in inspect.signature(custom_partitioning.def_partition).parameters


def applies(operands: dict[str, Any], varying: bool) -> bool:
    """Whether a call may be shared out: several devices, no shard_map around it, and nothing that counts items."""
    if not _CAN_TELL or varying or "seed" in operands or "offset" in operands or jax.device_count() == 1:
        return False
    mesh: Any = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    return not getattr(mesh, "manual_axes", ())


def call(plain: Plain, static: Static, operands: dict[str, Any], results: dict[str, Any]) -> Any:
    """plain(*operands, results), where the operands lie."""
    return _function(plain, _Roles(static.layout, tuple(operands), tuple(results), _sizes(static, operands, results)))(
        *operands.values(), shapes=tuple(results.values())
    )


def _sizes(static: Static, operands: dict[str, Any], results: dict[str, Any]) -> tuple[int, int, int, bool, bool]:
    """Batch, heads, kv heads, and whether batch items or heads are summed over in a result."""
    axis = 2 if static.layout == "BSHD" else 1
    batch, heads = operands["query"].shape[0], operands["query"].shape[axis]
    kv_heads = operands["key"].shape[axis]
    is_gradient = "grad_out" in operands
    bias = results["bias"].shape if is_gradient and "bias" in results else (batch, heads)
    sums_batch = (is_gradient and "sinks" in results) or bias[0] != batch
    return batch, heads, kv_heads, sums_batch, bias[1] != heads


class _Roles:
    """Which axis of each array is the batch and which the heads."""

    def __init__(
        self, layout: str, operands: tuple[str, ...], results: tuple[str, ...], sizes: tuple[int, int, int, bool, bool]
    ) -> None:
        self.key = (layout, operands, results, sizes)
        self.layout, self.operands, self.results = layout, operands, results
        self.batch, self.heads, self.kv_heads, self.sums_batch, self.sums_heads = sizes

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Roles) and self.key == other.key

    def axes(self, name: str, shape: Sequence[int]) -> tuple[int | None, int | None]:
        """The axes that may be sharded as the batch and as the heads; an axis of one element repeats."""
        heads_at = 2 if self.layout == "BSHD" and name in _POSITIONED else 1
        batch = 0 if name in _BATCHED + _PER_BATCH else None
        heads = heads_at if name in _BATCHED else 0 if name in _PER_HEAD else None
        own_heads = self.kv_heads if name in ("key", "value") else self.heads
        if batch is None or shape[batch] != self.batch or self.sums_batch:
            batch = None
        if heads is None or shape[heads] != own_heads or self.sums_heads:
            heads = None
        return batch, heads

    def rule(self, arrays: Sequence[Any], results: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        """The same as XLA's Shardy reads it: named factors of sizes, and those that must be whole, as they appear."""
        whole: list[str] = []
        group = self.heads // self.kv_heads if self.kv_heads else 1

        def text(name: str, shape: Sequence[int]) -> str:
            batch, heads = self.axes(name, shape)
            words = []
            for axis in range(len(shape)):
                if axis == batch:
                    words.append("b")
                elif axis == heads and (name in ("key", "value") or group == 1):
                    words.append("k")
                elif axis == heads:
                    words.append("(k g)")
                    if "g" not in whole:
                        whole.append("g")
                else:
                    whole.append(f"w{len(whole)}")
                    words.append(whole[-1])
            return " ".join(words)

        sides = [
            ", ".join(text(name, x.shape) for name, x in zip(names, some))
            for names, some in ((self.operands, arrays), (self.results, results))
        ]
        sizes = {"g": group} if "g" in whole else {}
        return " -> ".join(sides), {"need_replication_factors": tuple(whole), **sizes}

    def shardings(self, mesh: Any, arrays: Sequence[Any], results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Of operands and results, all as the query's batch and heads are sharded."""
        query = arrays[self.operands.index("query")]
        batch, heads = self.axes("query", query.shape)
        spec = tuple(query.sharding.spec) if isinstance(query.sharding, NamedSharding) else ()
        names = [spec[axis] if axis is not None and axis < len(spec) else None for axis in (batch, heads)]
        parts = [_count(mesh, name) for name in names]
        if self.batch % parts[0]:
            names[0] = None
        if self.kv_heads % parts[1]:
            names[1] = None

        def sharding(name: str, shape: Sequence[int]) -> NamedSharding:
            words: list[Any] = [None] * len(shape)
            for axis, of_mesh in zip(self.axes(name, shape), names):
                if axis is not None:
                    words[axis] = of_mesh
            return NamedSharding(mesh, PartitionSpec(*words))

        return (
            [sharding(name, x.shape) for name, x in zip(self.operands, arrays)],
            [sharding(name, x.shape) for name, x in zip(self.results, results)],
        )


def _count(mesh: Any, names: Any) -> int:
    """Devices along these axes of a mesh."""
    count = 1
    for name in (names,) if isinstance(names, str) else names or ():
        count *= mesh.shape[name]
    return count


@functools.lru_cache(maxsize=1024)
def _function(plain: Plain, roles: _Roles) -> Callable[..., Any]:
    """A call that XLA may share out, and that a vmap runs as it always did."""

    def run(*arrays: Any, shapes: tuple[Any, ...]) -> Any:
        shared = custom_partitioning(lambda *some: plain(*some, shapes=shapes))

        def shapes_of(results: Any) -> tuple[Any, ...]:
            return tuple(results) if isinstance(results, (tuple, list)) else (results,)

        def partition(mesh: Any, given: Any, results: Any) -> Any:
            own, of_results = roles.shardings(mesh, given, shapes_of(results))
            local = tuple(ShapeDtype(sharding.shard_shape(x.shape), x.dtype) for sharding, x in zip(of_results, shapes))
            return mesh, lambda *some: plain(*some, shapes=local), tuple(of_results), tuple(own)

        def infer(mesh: Any, given: Any, results: Any) -> Any:
            return tuple(roles.shardings(mesh, given, shapes_of(results))[1])

        text, factors = roles.rule(arrays, shapes)
        shared.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=text, **factors)
        mapped = jax.custom_batching.custom_vmap(lambda *some: tuple(shared(*some)))

        @mapped.def_vmap
        def _(axis_size: int, batched: Any, *some: Any) -> Any:
            axes = tuple(0 if one else None for one in batched)
            found = jax.vmap(lambda *x: plain(*x, shapes=shapes), in_axes=axes, axis_size=axis_size)(*some)
            return tuple(found), (True,) * len(shapes)

        return mapped(*arrays)

    return run
