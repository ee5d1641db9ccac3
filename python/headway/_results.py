"""What the functions of the extension return besides arrays."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple


class Gradients(NamedTuple):
    """The gradients of attention's inputs, each an array like its input, or None if there was no such input.

    >>> from headway import Gradients
    >>> Gradients(query=None, key=None, value=None)
    Gradients(
      query=None,
      key=None,
      value=None,
      bias=None,
      sinks=None)
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    sinks: Any = None

    def __repr__(self) -> str:
        """Types and shapes; the numbers are in the fields."""
        fields = (f"  {name}={_describe(array)}" for name, array in self._asdict().items())
        return "Gradients(\n" + ",\n".join(fields) + ")"


@dataclass(frozen=True, eq=False)
class Analysis:
    """What headway.analyze found; its docstring says what each field is.

    >>> import numpy as np, headway
    >>> x = np.zeros((1, 2, 4, 3))
    >>> headway.analyze(x, x)
    Analysis of 1 x 2 heads, 4 queries, 4 keys (means over the rows)
      head  entropy  distance  first  diagonal  near
      0, 0    1.386      1.25  0.250     0.250  1.000
      0, 1    1.386      1.25  0.250     0.250  1.000
    """

    lse: Any
    entropy: Any
    distance: Any
    first: Any
    diagonal: Any
    near: Any
    received: Any
    top_keys: Any
    top_weights: Any
    map_mean: Any
    map_max: Any
    row_cell: int
    key_cell: int
    similarity: Any

    def __repr__(self) -> str:
        """The heads' means, the first 16 of them."""
        queries, keys = int(self.lse.shape[-1]), int(self.received.shape[-1])
        leading = tuple(int(size) for size in self.lse.shape[:-1])
        what = "one head"
        if leading:
            what = " x ".join(map(str, leading)) + (" heads" if len(leading) == 2 else " items, one head each")
        heads = list(product(*map(range, leading)))
        lines = [f"Analysis of {what}, {queries} queries, {keys} keys (means over the rows)"]
        if queries:
            lines.append("  head  entropy  distance  first  diagonal  near")
            for head in heads[:16]:
                mean = {name: float(getattr(self, name)[head].mean()) for name in _ROW_STATISTICS}
                lines.append(
                    f"  {', '.join(map(str, head)) or '-':4} {mean['entropy']:8.3f} {mean['distance']:9.4g}  "
                    f"{mean['first']:.3f}     {mean['diagonal']:.3f}  {mean['near']:.3f}"
                )
            if len(heads) > 16:
                lines.append(f"  ... and {len(heads) - 16} more")
        return "\n".join(lines)


_ROW_STATISTICS = ("entropy", "distance", "first", "diagonal", "near")


def _describe(array: Any) -> str:
    return "None" if array is None else f"{array.dtype} {tuple(array.shape)}"
