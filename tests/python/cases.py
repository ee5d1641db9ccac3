"""Random attention calls in which every option is combined with every other."""

from __future__ import annotations

import doctest
import inspect
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import headway

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Those that read NumPy arrays.
HOST_ENGINES = [engine for engine in headway.engines() if engine != "cuda"]
# How far a result of moderate size may be from the float64 oracle: a few roundings of the type.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "float16": 6e-3, "bfloat16": 5e-2}


@dataclass
class Case:
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.query, self.key, self.value


def random_case(seed: int, dtype: str = "float64", rank: int | None = None) -> Case:
    """One call; the same seed gives the same call in every type."""
    rng = np.random.default_rng(seed)
    rank = rank or int(rng.choice([4, 4, 3, 2]))
    batch = int(rng.integers(1, 4)) if rank > 2 else 1
    kv_heads, group = (int(rng.integers(1, 3)), int(rng.integers(1, 4))) if rank == 4 else (1, 1)
    heads = kv_heads * group
    queries, keys = (int(n) for n in rng.integers(1, 24, 2))
    if rng.random() < 0.3:
        keys = queries
    width, value_width = (int(n) for n in rng.integers(1, 20, 2))

    def draw(head_count, length, size):
        array = rng.standard_normal((batch, head_count, length, size))
        return {4: array, 3: array[:, 0], 2: array[0, 0]}[rank].astype(DTYPES[dtype])

    case = Case(draw(heads, queries, width), draw(kv_heads, keys, width), draw(kv_heads, keys, value_width))
    case.options = random_options(rng, rank, batch, heads, queries, keys)
    return case


def random_options(rng, rank, batch, heads, queries, keys) -> dict[str, Any]:
    shape = {4: (batch, heads, queries, keys), 3: (batch, queries, keys), 2: (queries, keys)}[rank]

    def some(share=0.35):
        return rng.random() < share

    def broadcast_shape():
        drop = int(rng.integers(0, len(shape)))
        return tuple(1 if some(0.3) else size for size in shape[drop:])

    options: dict[str, Any] = {}
    if some():
        options["mask"] = rng.random(broadcast_shape()) < 0.7
    if some():
        bias = rng.standard_normal(broadcast_shape())
        bias[rng.random(bias.shape) < 0.2] = -np.inf
        options["bias"] = bias
    if some():
        options["causal"] = str(rng.choice(["top_left", "bottom_right"])) if queries != keys or some() else True
    if some():
        options["window"] = tuple(None if some(0.3) else int(n) for n in rng.integers(0, 12, 2))
    if some():
        rows = (batch, queries) if some(0.5) else (batch,)
        options["valid_lens"] = rng.integers(0, keys + 1, rows)
    if some(0.25):
        options["query_lens"] = rng.integers(0, queries + 1, batch)
    if some():
        options["scale"] = float(rng.uniform(-1, 1))
    if some():
        options["softcap"] = float(rng.uniform(0.5, 5))
    if some():
        options["alibi_slopes"] = rng.random(heads)
    if some():
        options["sinks"] = rng.standard_normal(heads)
    if some(0.25):
        options.update(dropout=float(rng.choice([0.1, 0.5, 1.0])), seed=int(rng.integers(0, 2**63)))
    return options


def without_batch_and_heads(array: np.ndarray, rank: int) -> np.ndarray:
    """An oracle's (B, H, ...) result as a call of this rank gives it."""
    return {4: array, 3: array[:, 0], 2: array[0, 0]}[rank]


def assert_close(actual: Any, expected: np.ndarray, dtype: str, scale: float = 1.0) -> None:
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == expected.shape
    size = max(1.0, np.max(np.abs(expected), initial=0, where=np.isfinite(expected)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=scale * TOLERANCE[dtype] * size)


def check_examples(item: Any) -> None:
    """The item's docstring has examples, and they run."""
    name = getattr(item, "__name__", repr(item))
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(item), {}, name, None, 0)
    assert example.examples, f"{name} has no example"
    output: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=output.append)
    assert result.failed == 0, "".join(output)
