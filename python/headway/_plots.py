"""Figures for reports, with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headway import _headway
from headway._arguments import shown, whole_number
from headway._results import Analysis
from headway.convert import to_numpy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from headway._headway import Options

_MOST_BARS = 40
_COLOUR = "#08519c"


def plot_heads(
    analysis: Analysis | Sequence[Analysis],
    *,
    value: Literal["mean", "max"] = "mean",
    scale: Literal["log", "linear"] = "log",
    titles: Sequence[str] | None = None,
) -> Any:
    """Every head of an analysis as a map of its weights, rows down and keys across; returns the matplotlib figure.

    Given several analyses, the layers of a model, each is one row of maps. value is what a cell shows, the mean or the
    largest of its weights; scale its colour. titles has one text for each head, in place of "head 3" and its entropy.

    >>> import numpy as np, headway
    >>> x = np.random.default_rng(0).standard_normal((1, 4, 64, 16), dtype=np.float32)
    >>> figure = headway.plot_heads(headway.analyze(x, x, causal=True))
    >>> figure.axes[3].get_title()
    'head 3  entropy 2.09'
    """
    pyplot, colors = _matplotlib("plot_heads")
    layers = [analysis] if isinstance(analysis, Analysis) or not isinstance(analysis, Iterable) else list(analysis)
    for layer in layers:
        if not isinstance(layer, Analysis):
            raise TypeError(f"plot_heads: found {shown(layer)}, expected what headway.analyze gives, or a list of that")
    if value not in ("mean", "max") or scale not in ("log", "linear"):
        raise ValueError(f"plot_heads: value is {value!r} and scale {scale!r}, expected mean or max, and log or linear")
    maps = [_heads_of(getattr(layer, f"map_{value}"), 2) for layer in layers]
    count = sum(map(len, maps))
    if count == 0 or any(head.size == 0 for layer in maps for head in layer):
        raise ValueError("plot_heads: there is nothing to show: no heads, or an analysis with cells=0")
    if titles is not None and len(titles) != count:
        raise ValueError(f"plot_heads: titles has {len(titles)} entries, expected {count}")
    columns = max(map(len, maps)) if len(layers) > 1 else min(count, max(4, math.ceil(math.sqrt(count))))
    rows = len(layers) if len(layers) > 1 else math.ceil(count / columns)
    side = 2.0 if columns <= 8 else 1.25
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(side * columns + 0.4, side * 1.12 * rows + 0.3), squeeze=False, layout="constrained"
    )
    places = [(n, h) for n, layer in enumerate(maps) for h in range(len(layer))]
    if len(layers) == 1:
        places = [divmod(n, columns) for n in range(count)]
    flat = [(layer, n, head) for n, layer in enumerate(layers) for head in range(len(maps[n]))]
    for ax in axes.flat:
        ax.set_axis_off()
    for place, (layer, n, head), title in zip(places, flat, titles or [""] * count):
        ax, numbers = axes[place], maps[n][head]
        highest = float(np.max(numbers, where=np.isfinite(numbers), initial=0.0)) or 1.0
        norm = colors.LogNorm(highest / 1e4, highest, clip=True) if scale == "log" else colors.Normalize(0, highest)
        sizes = (int(layer.lse.shape[-1]), int(layer.received.shape[-1]))
        ax.imshow(
            numbers, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest", extent=(0, sizes[1], sizes[0], 0)
        )
        ax.set_axis_on()
        ax.set_xticks([])
        ax.set_yticks([])
        for spine in ax.spines.values():
            spine.set_color("#c8ccd0")
        ax.set_title(title or _title(layers, layer, n, head), fontsize=8 if columns <= 8 else 6)
    if pyplot.get_backend().endswith("inline"):  # a notebook shows what a cell returns, and every open figure too
        pyplot.close(figure)
    return figure


def plot_row(
    query: Any,
    key: Any,
    row: int,
    *,
    head: int = 0,
    item: int = 0,
    tokens: Sequence[str] | None = None,
    keys: tuple[int, int] | None = None,
    ax: Any | None = None,
    **options: Unpack[Options],
) -> Any:
    """The exact weights of one row of one head as bars over the keys; returns the matplotlib axes.

    query (B, H, Sq, D), key (B, Hkv, Sk, D), or fewer axes; head and item say which one. keys is a part (begin, end) of
    them. With tokens, one text for each key, up to 40 keys are named; of more, the 40 strongest are shown, in
    order. Options as for attention.

    >>> import numpy as np, headway
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 8))
    >>> ax = headway.plot_row(x[None], x[None], 4, head=1, tokens="the cat sat down .".split(), causal=True)
    >>> [label.get_text() for label in ax.get_xticklabels()]
    ['the', 'cat', 'sat', 'down', '.']
    """
    pyplot, _ = _matplotlib("plot_row")
    for name, array in (("query", query), ("key", key)):
        if len(getattr(array, "shape", ())) < 2:
            raise ValueError(
                f"plot_row: {name} is {shown(array)}, expected an array (B, H, length, width) or fewer axes"
            )
    axis = -3 if options.get("layout") == "bshd" and len(query.shape) == 4 else -2
    queries, size = int(query.shape[axis]), int(key.shape[axis])
    row, head, item = (
        whole_number("plot_row", name, given) for name, given in (("row", row), ("head", head), ("item", item))
    )
    begin, end = keys if keys is not None else (0, size)
    if not 0 <= row < queries:
        raise ValueError(f"plot_row: row is {row}, expected 0 to {queries - 1}")
    if tokens is not None and len(tokens) != size:
        raise ValueError(f"plot_row: tokens has {len(tokens)} entries, expected {size}")
    part = _headway.weights_in(query, key, (row, row + 1), (begin, end), **options)
    # (B, H, 1, keys), (B, 1, keys) or (1, keys)
    leading = {4: (item, head), 3: (item,), 2: ()}[len(part.shape)]
    for name, given, limit in zip(("item", "head"), leading, part.shape):
        if not 0 <= given < limit:
            raise ValueError(f"plot_row: {name} is {given}, expected 0 to {int(limit) - 1}")
    weights = to_numpy(part[leading])[0]
    axes: Any = ax if ax is not None else pyplot.subplots(figsize=(8, 2.6), layout="constrained")[1]
    bars = np.arange(len(weights))
    if tokens is not None and len(weights) > _MOST_BARS:
        bars = np.sort(np.argsort(-weights, kind="stable")[:_MOST_BARS])
    if tokens is None:
        axes.fill_between(
            begin + np.append(bars, len(weights)), np.append(weights, weights[-1:]), step="post", color=_COLOUR
        )
        axes.set_xlim(begin, end)
        axes.set_xlabel("key")
    else:
        axes.bar(np.arange(len(bars)), weights[bars], color=_COLOUR, width=0.85)
        axes.set_xticks(np.arange(len(bars)), [_label(tokens[begin + int(n)]) for n in bars], rotation=60, ha="right")
        axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("weight")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    whose = f"row {row}" if tokens is None or queries != size else f"row {row}, {_label(tokens[row])!r}"
    axes.set_title(whose if not leading else f"{whose}, head {head}" if len(leading) == 2 else f"{whose}, item {item}")
    return axes


def _matplotlib(function: str) -> tuple[Any, Any]:
    try:
        from matplotlib import colors, pyplot
    except ImportError as error:
        raise ImportError(f"{function} needs matplotlib: pip install matplotlib") from error
    return pyplot, colors


def _heads_of(array: Any, own_axes: int) -> list[Any]:
    """(.., R, C) -> one (R, C) for each head."""
    numbers = to_numpy(array)
    leading = numbers.ndim - own_axes
    return list(numbers.reshape(math.prod(numbers.shape[:leading]), *numbers.shape[leading:]))


def _title(layers: list[Analysis], layer: Analysis, number: int, head: int) -> str:
    leading = tuple(int(size) for size in layer.lse.shape[:-1])
    entropy = f"entropy {_heads_of(layer.entropy, 1)[head].mean():.2f}"
    if len(layers) > 1:
        return f"layer {number}, head {head}"
    if len(leading) < 2:
        return f"item {head}  {entropy}" if leading else entropy
    item, own = list(product(*map(range, leading)))[head]
    return f"head {own}  {entropy}" if leading[0] == 1 else f"item {item}, head {own}  {entropy}"


def _label(token: str) -> str:
    """A token that matplotlib draws as it is: no mathematics, no line breaks, not endless."""
    visible = token.replace("\n", "⏎").replace("\t", "⇥")
    return (visible if len(visible) <= 16 else visible[:15] + "…").replace("$", r"\$")
