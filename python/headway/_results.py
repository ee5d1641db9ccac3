"""What the functions of the extension return besides arrays."""

from __future__ import annotations

from typing import Any, NamedTuple


class Gradients(NamedTuple):
    """The gradients of attention's inputs, each an array like the input it belongs to, or None where there was none.

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


def _describe(array: Any) -> str:
    return "None" if array is None else f"{array.dtype} {tuple(array.shape)}"
