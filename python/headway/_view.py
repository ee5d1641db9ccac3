"""headway.view: a page that shows attention, as a file or from this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from headway import _headway
from headway._arguments import flag, path_bytes, shown
from headway._errors import named
from headway._page import Page, is_page
from headway._server import ViewServer
from headway._tabs import page_of, write
from headway._weights import layers_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from headway._headway import Options

_DEFAULT_PATH = "attention.html"


@overload
def view(
    query: Any = None,
    key: Any = None,
    *,
    weights: Any = None,
    tokens: Iterable[str] | None = None,
    query_tokens: Iterable[str] | None = None,
    head_names: Iterable[str] | None = None,
    title: str = "Attention",
    path: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    serve: Literal[False] = False,
    port: int = 0,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Page: ...
@overload
def view(
    query: Any = None,
    key: Any = None,
    *,
    weights: Any = None,
    tokens: Iterable[str] | None = None,
    query_tokens: Iterable[str] | None = None,
    head_names: Iterable[str] | None = None,
    title: str = "Attention",
    path: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    serve: Literal[True],
    port: int = 0,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> ViewServer: ...
def view(
    query: Any = None,
    key: Any = None,
    *,
    weights: Any = None,
    tokens: Iterable[str] | None = None,
    query_tokens: Iterable[str] | None = None,
    head_names: Iterable[str] | None = None,
    title: str = "Attention",
    path: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    serve: bool = False,
    port: int = 0,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Page | ViewServer:
    """Writes a page that shows attention, in one HTML file that needs nothing else, and returns its path.

    query (B, H, Sq, D), key (B, Hkv, Sk, D), or fewer axes; options as for attention. Or, in their place, weights that
    are already there: (B, H, Sq, Sk) or fewer axes, or a list of them, one for each layer of a model. A structured mask
    without query and key is shown as it is, each query's weights even over the keys that it sees. tokens has one
    text for each key, and for each query where there are as many; query_tokens are for other queries. Whatever a token
    holds is shown, never run. A small matrix is in the file whole; a large one as means and maxima of cells, so that
    the file stays below 5 MB.

    What returns is a path, which a notebook shows as the page itself. An existing file is an error unless overwrite is
    True; where no path is given, attention.html is written, in place of an earlier page of that name.

    With serve=True nothing is written: the page comes from this machine, with every zoom level of every head computed
    when it is looked at, at any length. What returns has url, close() and, for scripts, wait(), which ends with Ctrl-C;
    query and key must stay as they are meanwhile. port is the one to listen on, any free one where it is 0. Arrays on a
    CUDA device stay there, and the page's parts are computed there.

    progress shows how far a long analysis is: None means on a terminal and in a notebook. Ctrl-C leaves no file behind.

    >>> import numpy as np, headway, tempfile
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = headway.view(x, x, tokens="the cat sat down .".split(), path=f"{folder}/cat.html", causal=True)
    ...     page.name, page.stat().st_size > 10_000
    ('cat.html', True)
    """
    if weights is not None:
        if query is not None or key is not None or options:
            raise ValueError("view: weights is given, and so is what weights come from: expected one of the two")
        layers, queries, keys = layers_of(weights)
    else:
        mask = options.get("mask")
        if query is None and key is None and isinstance(mask, _headway.Mask):
            tokens = None if tokens is None or isinstance(tokens, str) else list(tokens)
            query, key = _even(mask, tokens, query_tokens)
        if query is None or key is None:
            name = "query" if query is None else "key"
            raise TypeError(f"view: {name} is missing: expected query and key, or weights=")
        with named("view"):
            layers = [_headway.view_layer(query, key, **options)]
        heads_third = options.get("layout") == "bshd" and len(query.shape) == 4
        queries, keys = (
            int(array.shape[-3 if heads_third else -2]) if len(array.shape) > 1 else 0 for array in (query, key)
        )
    # Of weights, the options would be those by which they reach the page.
    texts = Texts(title, tokens, query_tokens, head_names, queries, keys, name_options=weights is None)
    return show(layers, texts, path, overwrite, serve, port, progress)


def _even(mask: _headway.Mask, tokens: list[str] | None, query_tokens: Iterable[str] | None) -> tuple[Any, Any]:
    """Queries and keys that are all alike, as many as there are tokens."""
    if tokens is None:
        raise TypeError("view: a mask without query and key needs tokens, expected a list with one for each key")
    queries = len(tokens) if query_tokens is None else len(list(query_tokens))
    query, key = (np.zeros((mask.batch, mask.heads, length, 1), np.float32) for length in (queries, len(tokens)))
    return query, key


class Texts:
    """What is written on a page, as the compiled part takes it."""

    def __init__(
        self,
        title: str,
        tokens: Iterable[str] | None,
        query_tokens: Iterable[str] | None,
        head_names: Iterable[str] | None,
        queries: int,
        keys: int,
        name_options: bool = True,
    ) -> None:
        self.title = str(title)
        self.keys = _texts("tokens", tokens, keys)
        self.queries = _texts("query_tokens", query_tokens, queries)
        self.heads = _texts("head_names", head_names, None)
        self.name_options = name_options

    def all(self) -> tuple[str, list[str], list[str], list[str], bool]:
        """In the compiled part's order."""
        return self.title, self.keys, self.queries, self.heads, self.name_options


def _texts(name: str, given: Iterable[str] | None, count: int | None) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, Iterable):
        raise TypeError(f"view: {name} is {shown(given)}, expected a list of str")
    texts = [given] if isinstance(given, str) else list(given)
    for n, text in enumerate(texts):
        if isinstance(given, str) or not isinstance(text, str):
            found = "a str" if isinstance(given, str) else f"a list whose entry {n} is a {type(text).__name__}"
            raise TypeError(f"view: {name} is {found}, expected a list of str")
    if count is not None and len(texts) != count:
        raise ValueError(f"view: {name} has {len(texts)} entries, expected {count}")
    return texts


def show(
    layers: Sequence[_headway.ViewLayer],
    texts: Texts,
    path: str | os.PathLike[str] | None,
    overwrite: bool,
    serve: bool,
    port: int,
    progress: bool | None,
) -> Page | ViewServer:
    """The page of some layers: a file, or a server."""
    with named("view"):
        if serve:
            return ViewServer(_headway.LiveView(list(layers), *texts.all(), progress), port)
        target = Page(os.fsdecode(path_bytes("view", _DEFAULT_PATH if path is None else path)))
        replace = flag("view", "overwrite", overwrite) or (path is None and is_page(target))
        _headway.write_view(list(layers), os.fsencode(target), *texts.all(), replace, progress)
        return target


# Layers of one length, with the texts along their sides and a name.
Group = tuple[str, Sequence[_headway.ViewLayer], Texts]


def show_together(
    groups: Sequence[Group], title: str, path: str | os.PathLike[str] | None, overwrite: bool, progress: bool | None
) -> Page:
    """One file with a page for each group, one of which is shown at a time."""
    target = Page(os.fsdecode(path_bytes("view", _DEFAULT_PATH if path is None else path)))
    replace = flag("view", "overwrite", overwrite) or (path is None and is_page(target))
    write(target, together(groups, title, progress), replace)
    return target


def together(groups: Sequence[Group], title: str, progress: bool | None = None) -> str:
    """The page of one group, or a page that holds those of all of them."""
    pages = [(name, _page_text(layers, texts, progress)) for name, layers, texts in groups]
    return pages[0][1] if len(pages) == 1 else page_of(title, pages)


def _page_text(layers: Sequence[_headway.ViewLayer], texts: Texts, progress: bool | None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        with named("view"):
            _headway.write_view(list(layers), os.fsencode(path), *texts.all(), False, progress)
        return path.read_text("utf-8")
