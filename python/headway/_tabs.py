"""Several pages as one: each in a frame of its own, one of them shown at a time."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from errno import EEXIST, EISDIR, ENODEV, EOPNOTSUPP
from html import escape
from pathlib import Path

from headway._errors import os_error
from headway._page import MARK, in_frame

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{mark}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
html, body {{ margin: 0; height: 100%; font: 14px system-ui, sans-serif; background: #fbfbfa; color: #1c1f23 }}
@media (prefers-color-scheme: dark) {{
  html, body {{ color-scheme: dark; background: #14171a; color: #e8eaec }}
}}
fieldset {{ border: 0; margin: 0; padding: 6px 12px; height: 32px; box-sizing: border-box; white-space: nowrap;
  min-width: 0; overflow-x: auto }}
label {{ margin-right: 16px }}
iframe {{ position: absolute; top: 32px; left: 0; width: 100%; height: calc(100% - 32px); border: 0;
  visibility: hidden }}
{chosen} {{ visibility: visible }}
</style>
</head>
<body>
<fieldset aria-label="Layers">
{choices}
</fieldset>
{frames}
</body>
</html>
"""


def page_of(title: str, pages: Sequence[tuple[str, str]]) -> str:
    """One page of (name, page) pairs. It has no script: which one is shown is a matter of style."""
    numbers = range(len(pages))
    choice = '<label><input type="radio" name="page" id="page{}"{}> {}</label>'
    return _PAGE.format(
        mark=MARK,
        title=escape(title),
        chosen=", ".join(f"body:has(#page{n}:checked) iframe:nth-of-type({n + 1})" for n in numbers),
        choices="\n".join(choice.format(n, " checked" if n == 0 else "", escape(pages[n][0])) for n in numbers),
        frames="\n".join(in_frame(text, style=None) for _, text in pages),
    )


def write(path: Path, text: str, replace: bool) -> None:
    """Writes a file whole or not at all; FileExistsError where there is one already, unless it may be replaced."""
    target = Path(os.path.realpath(path)) if replace else path  # a link is followed
    try:
        if not replace and os.path.lexists(target):
            raise FileExistsError
        if target.exists() and not target.is_file():  # also a folder
            raise OSError(EISDIR if target.is_dir() else ENODEV, "expected a regular file to overwrite")
        _write_whole(target, text.encode("utf-8", "backslashreplace"), replace)
    except FileExistsError:
        raise os_error(EEXIST, f"view: {path}: the file exists; set overwrite to replace it") from None
    except OSError as error:
        raise os_error(error.errno, f"view: {path}: cannot be written: {error.strerror}") from None


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _write_whole(target: Path, page: bytes, replace: bool) -> None:
    temporary = target.parent / f".headway-{secrets.token_hex(8)}.tmp"
    try:  # unnamed: nothing remains of it if the process dies
        number = os.open(target.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (EISDIR, EOPNOTSUPP):
            raise
        number = os.open(temporary, _NEW, 0o666)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(page)
            file.flush()
            os.fsync(number)
            if not temporary.exists():
                # With a descriptor, whichever it is, Python follows the link that leads to the unnamed file.
                os.link(f"/proc/self/fd/{number}", temporary, src_dir_fd=number)
        if not replace:
            os.close(os.open(target, _NEW, 0o666))  # the name, unless somebody has it by now
        os.replace(temporary, target)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
