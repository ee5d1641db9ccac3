"""Errors of the compiled part in the words of who was called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_INNER = re.compile(
    r"^(write_view|view_layer|LiveView|write_trace|save_safetensors|load_safetensors|MultiHeadAttention::\w+)(?=[:(])"
)


@contextmanager
def named(function: str) -> Iterator[None]:
    """Errors that begin with the name of an inner function begin with this one, which the user knows."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, MemoryError, OSError) as error:
        text, count = _INNER.subn(function, str(error))
        if count == 0:
            raise
        raise type(error)(text) from None
