"""trace: every step of attention with its numbers, to print, to look at, and to step through in a page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headway import _headway
from headway._arguments import flag, path_bytes, shown
from headway._errors import named
from headway._page import Page, in_frame
from headway.functions import same_type
from headway.layer import MultiHeadAttention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from headway._headway import Options, TraceData

_WEIGHTS = ("W_q", "b_q", "W_k", "b_k", "W_v", "b_v", "W_o", "b_o")


def trace(
    query: Any,
    key: Any,
    value: Any,
    *,
    layer: MultiHeadAttention | Mapping[str, Any] | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    title: str | None = None,
    **options: Unpack[Options],
) -> Trace:
    """Every step of attention(query, key, value, ...) with its numbers, in float64, as the definition says.

    For small inputs: a step of more than 16384 numbers is a ValueError. The arrays and options are attention's, and
    integers and lists are taken too. print() the result, let a notebook show it, or save() it as a page.

        heads, kv_heads   the heads lie side by side, query (B, Sq, heads * D) or without B: the trace splits and joins
                          them
        layer             query, key and value are the inputs of this layer: a headway.MultiHeadAttention, or a dict of
                          W_q, W_k, W_v, W_o (in, out) and b_q, b_k, b_v, b_o (out,), of which some may be missing
        tokens            one text a key, and a query where there are as many, to show instead of numbers
        query_tokens      one text a query

    >>> import numpy as np, headway
    >>> X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    >>> found = headway.trace(X, X, X, heads=2, causal=True)
    >>> found["scores"].numbers
    array([[[  5.,  17.],
            [ 17.,  61.]],
    <BLANKLINE>
           [[ 25.,  53.],
            [ 53., 113.]]])
    >>> bool(np.allclose(found.result, [[1, 2, 3, 4], [5, 6, 7, 8]]))
    True
    >>> layer = headway.MultiHeadAttention(num_hiddens=4, num_heads=2)
    >>> bool(np.allclose(headway.trace(X, X, X, layer=layer).result, layer.forward(X[None], X[None], X[None])[0]))
    True
    """
    weights: dict[str, Any] = {}
    if isinstance(layer, MultiHeadAttention):
        if heads is not None or kv_heads is not None:
            raise ValueError(f"trace: the layer has {layer.num_heads} heads; heads and kv_heads go without it")
        heads = layer.num_heads
        weights = _weights_of(layer)
    elif isinstance(layer, Mapping):
        weights = dict(layer)
    elif layer is not None:
        raise TypeError(f"trace: layer is a {type(layer).__name__}, expected a headway.MultiHeadAttention or a dict")
    given = (query, key, value)
    once = dict(
        zip(map(id, given), same_type("trace", query=query, key=key, value=value))
    )  # an array that is two inputs stays one, and is shown once
    query, key, value = (once[id(array)] for array in given)
    made = _headway.trace(
        query,
        key,
        value,
        heads=heads,
        kv_heads=kv_heads,
        weights={name: same_type("trace", **{str(name): weight})[0] for name, weight in weights.items()},
        tokens=_texts("tokens", tokens),
        query_tokens=_texts("query_tokens", query_tokens),
        title=title,
        **options,
    )
    return Trace(made)


def _weights_of(layer: MultiHeadAttention) -> dict[str, Any]:
    """Its parameters by name; biases that are all 0 are none."""
    found = {name: getattr(layer, name) for name in _WEIGHTS}
    return {name: weight for name, weight in found.items() if name[0] == "W" or np.any(weight)}


def _texts(name: str, texts: Sequence[str] | None) -> list[str] | None:
    if texts is None:
        return None
    listed = None if isinstance(texts, str | bytes) or not isinstance(texts, Iterable) else list(texts)
    if listed is None or not all(isinstance(text, str) for text in listed):
        raise TypeError(f"trace: {name} is {shown(texts)}, expected a list of texts")
    return listed


@dataclass(frozen=True, eq=False)
class TraceStep:
    """One step of a trace.

    name, symbol   "scaled scores", "S"
    formula, why   how its numbers are computed, and one sentence on why
    kind           "given", "product", "regrouped", "elementwise", "allowed" or "reduced"
    axes           what each axis of the numbers counts: "batch", "head", "query", "key", "token", "dim", "in", "out"
    numbers        float64, read-only
    sources        (step, part) of each step that it is computed from
    text           what print() shows

    >>> import headway
    >>> headway.trace([[2.0]], [[3.0]], [[1.0]])["scores"]
    TraceStep(scores (1, 1): S[i,j] = sum over d of Q[i,d] * K[j,d])
    """

    name: str
    symbol: str
    formula: str
    why: str
    kind: str
    axes: tuple[str, ...]
    numbers: Any
    sources: tuple[tuple[int, str], ...]
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"TraceStep({self.name} {self.numbers.shape}: {self.formula})"


class Trace:
    """The steps of one attention call, from headway.trace.

    print() it for the text, save() it as a page, or take a step by its name or number.

    >>> import headway
    >>> found = headway.trace([[2.0]], [[3.0]], [[7.0]])
    >>> found
    <Trace: 10 steps, result (1, 1)>
    >>> [step.name for step in found][3:6]
    ['scores', 'scaled scores', 'row maxima']
    >>> found["weights"].numbers, found.result
    (array([[1.]]), array([[7.]]))
    >>> print(found["scores"])
     4  scores  (1, 1)  S[i,j] = sum over d of Q[i,d] * K[j,d]
        The dot product of a query and a key: large where the two point the same way.
              k0
          q0   6
    """

    def __init__(self, data: TraceData) -> None:
        self._data = data
        self.steps: tuple[TraceStep, ...] = tuple(map(_step, data.steps()))

    @property
    def result(self) -> Any:
        """The last step's numbers: what attention, or the layer, returns."""
        return self.steps[-1].numbers

    def __getitem__(self, which: str | int) -> TraceStep:
        if not isinstance(which, str):
            return self.steps[which]
        for step in self.steps:
            if step.name == which:
                return step
        raise KeyError(f"{which!r}; the steps are {', '.join(step.name for step in self.steps)}")

    def __iter__(self) -> Iterator[TraceStep]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        return self._data.text().rstrip("\n")

    def __repr__(self) -> str:
        return f"<Trace: {len(self)} steps, result {self.result.shape}>"

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Page:
        """Writes a page to step through, one HTML file that needs nothing else, and returns its path.

        A file that exists is an error, unless overwrite says to replace it.

        >>> import headway, os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = headway.trace([[2.0]], [[3.0]], [[7.0]]).save(os.path.join(folder, "trace.html"))
        ...     page.name, page.stat().st_size > 10_000
        ('trace.html', True)
        """
        with named("Trace.save"):
            self._data.save(path_bytes("Trace.save", path), flag("Trace.save", "overwrite", overwrite))
        return Page(os.fsdecode(path))

    def _repr_html_(self) -> str:
        """What a notebook shows: the page."""
        return in_frame(self._data.page())


def _step(parts: tuple[Any, ...]) -> TraceStep:
    name, symbol, formula, why, kind, axes, shape, numbers, sources, text = parts
    array = np.frombuffer(numbers, np.float64).reshape(shape)
    return TraceStep(name, symbol, formula, why, kind, tuple(axes), array, tuple(sources), text.rstrip("\n"))
