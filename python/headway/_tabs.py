"""Several pages as one: each in a frame of its own, one of them shown at a time."""

from __future__ import annotations

from collections.abc import Sequence
from errno import EEXIST
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
    """Writes a file; FileExistsError where there is one already, unless it may be replaced."""
    try:
        with path.open("w" if replace else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise os_error(EEXIST, f"view: {path}: the file exists; set overwrite to replace it") from None
    except OSError as error:
        raise os_error(error.errno, f"view: {path}: cannot be written: {error.strerror}") from None
