"""Errors of the compiled part in the words of who was called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_INNER = re.compile(
    r"^(write_view|view_layer|LiveView|write_trace|save_safetensors|load_safetensors|KVCache::\w+|MultiHeadAttention::\w+)(?=[:(])"
)


class OutOfPages(MemoryError):
    """A KVCache has too few free pages for an append. It is a MemoryError; the cache is unchanged.

    >>> import numpy as np, headway
    >>> cache = headway.KVCache(pages=1, page_size=2, kv_heads=1, head_dim=4)
    >>> rows = np.zeros((1, 1, 3, 4), np.float32)
    >>> try:
    ...     cache.append([cache.add()], rows, rows)
    ... except headway.OutOfPages as error:
    ...     print(error)
    KVCache.append: 2 pages of 2 tokens are needed, 1 of 1 are free
    """


OutOfPages.__module__ = "headway"


def os_error(number: int | None, text: str) -> OSError:
    """The OSError of an errno, of the class that open() gives it (FileNotFoundError, ...), whose str() is the text.

    >>> error = os_error(2, "view: no/page.html: cannot be written")
    >>> error, error.errno
    (FileNotFoundError('view: no/page.html: cannot be written'), 2)
    >>> os_error(13, "view: page.html: cannot be written")
    PermissionError('view: page.html: cannot be written')
    """
    if not number:
        return OSError(text)
    made = type(OSError(number, text))(text)
    made.errno = number
    return made


@contextmanager
def named(function: str) -> Iterator[None]:
    """Errors that begin with the name of an inner function begin with this one, which the user knows."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, MemoryError, OSError) as error:
        text, count = _INNER.subn(function, str(error))
        if count == 0:
            raise
        raise (os_error(error.errno, text) if isinstance(error, OSError) else type(error)(text)) from None
