"""How far a long call is: tqdm's bar, in notebooks too, or without tqdm a line on the terminal."""

from __future__ import annotations

import importlib
import importlib.util
import math
import shutil
import sys
import time
from contextlib import suppress
from typing import Any, Protocol, TextIO

from headway._arguments import shown

_QUIET_TIME = 0.3  # seconds: what is over sooner shows nothing
_WIDTH = 30


class Progress(Protocol):
    """Called with the share that is done, closed in the end."""

    def __call__(self, share: float) -> None: ...
    def close(self) -> None: ...


def bar_for(wanted: bool | None, operation: str) -> Progress | None:
    """A bar where one is wanted: None means on a terminal and in a notebook."""
    if wanted is not None and not isinstance(wanted, bool):
        raise TypeError(f"{operation}: progress is {shown(wanted)}, expected True, False or None")
    stream: TextIO | None = sys.stderr
    if stream is None or wanted is False or (wanted is None and not (stream.isatty() or _in_notebook())):
        return None
    return _tqdm(stream) or Bar(stream)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: its output can draw over itself, though it is no terminal."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _tqdm(stream: TextIO) -> Progress | None:
    """tqdm's bar, where it is installed; in a notebook its widget, where that can be drawn."""
    names = ["tqdm.std"]
    if _in_notebook() and importlib.util.find_spec("ipywidgets") is not None:
        names.insert(0, "tqdm.notebook")
    for name in names:
        with suppress(ImportError):
            return _TqdmBar(importlib.import_module(name).tqdm, stream)
    return None


class _TqdmBar:
    """A bar of tqdm's, which appears only when the call takes a while."""

    def __init__(self, kind: Any, stream: TextIO) -> None:
        self._kind, self._stream = kind, stream
        self._start = time.monotonic()
        self._bar: Any = None

    def __call__(self, share: float) -> None:
        elapsed = time.monotonic() - self._start
        if self._bar is None:
            if elapsed < _QUIET_TIME or share <= 0:
                return
            # Some terminals say that they have no columns or rows, and tqdm then draws nothing.
            columns = min(100, shutil.get_terminal_size().columns)
            width = {"ncols": columns, "nrows": 20} if self._stream.isatty() else {}
            self._bar = self._kind(
                **width, total=100, desc="headway", file=self._stream, leave=False,
                bar_format="{desc} {percentage:3.0f} %|{bar}| {elapsed}<{remaining}",
            )  # fmt: skip
            self._bar.start_t -= elapsed
        self._bar.update(min(100.0, 100 * share) - self._bar.n)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()


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
