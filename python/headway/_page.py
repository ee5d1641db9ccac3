"""Pages that Headway wrote: paths of HTML files, which a notebook shows in place."""

from __future__ import annotations

from html import escape
from pathlib import PosixPath

MARK = '<meta name="generator" content="Headway">'  # near the top of every page


class Page(PosixPath):
    """The path of a page: a pathlib.Path like any other, and in a notebook the page itself.

    >>> import numpy as np, headway, tempfile
    >>> x = np.eye(4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = headway.view(x, x, path=f"{folder}/page.html")
    ...     page.suffix, page._repr_html_()[:15]
    ('.html', '<iframe srcdoc=')
    """

    def _repr_html_(self) -> str | None:
        """The page inside the notebook; None, which shows the path, for a file that is none of Headway's pages."""
        return in_frame(self.read_text("utf-8", "replace")) if is_page(self) else None


def is_page(path: PosixPath) -> bool:
    """Whether the file is a page that Headway wrote."""
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(2000)
    except OSError:
        return False


def in_frame(page: str, style: str | None = "width:100%;height:720px;border:0") -> str:
    """A whole page as one element of another, apart from everything in that: Jupyter, VS Code and Colab show it."""
    own_style = f' style="{style}"' if style else ""
    return f'<iframe srcdoc="{escape(page)}" title="Headway"{own_style} allow="clipboard-write"></iframe>'
