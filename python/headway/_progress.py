"""The line on the terminal that shows how far a long call is."""

from __future__ import annotations

import math
import sys
import time
from typing import TextIO

_QUIET_TIME = 0.3  # seconds: what is over sooner shows nothing
_WIDTH = 30


def bar_for(wanted: bool | None) -> Bar | None:
    """A bar where one is wanted: None means on a terminal only."""
    if wanted is not None and not isinstance(wanted, bool):
        raise TypeError(f"progress is {wanted!r}, expected True, False or None")
    stream: TextIO | None = sys.stderr
    if stream is None or wanted is False or (wanted is None and not stream.isatty()):
        return None
    return Bar(stream)


class Bar:
    """[###...]  12 %  7 s left: called with the share that is done, wiped in the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = time.monotonic()
        self._shown = ""

    def __call__(self, share: float) -> None:
        elapsed = time.monotonic() - self._start
        if elapsed < _QUIET_TIME or share <= 0:
            return
        filled = min(_WIDTH, int(share * _WIDTH))
        left = math.ceil(elapsed / share - elapsed)
        line = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {int(share * 100):3} %  {left} s left"
        if line != self._shown:
            self._write("\r" + line.ljust(len(self._shown)))
            self._shown = line

    def close(self) -> None:
        """Wipes the line, and the ^C that a terminal writes behind it."""
        if self._shown:
            self._write("\r" + " " * (len(self._shown) + 2) + "\r")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a stream that is gone must not stop the work
            pass
