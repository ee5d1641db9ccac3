"""headway.view: a page that shows attention, as a file or from this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from headway import _headway
from headway._server import ViewServer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from headway._headway import Options


@overload
def view(
    query: Any,
    key: Any,
    *,
    tokens: Iterable[str] | None = None,
    query_tokens: Iterable[str] | None = None,
    head_names: Iterable[str] | None = None,
    title: str = "Attention",
    path: str | os.PathLike[str] = "attention.html",
    overwrite: bool = False,
    serve: Literal[False] = False,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Path: ...
@overload
def view(
    query: Any,
    key: Any,
    *,
    tokens: Iterable[str] | None = None,
    query_tokens: Iterable[str] | None = None,
    head_names: Iterable[str] | None = None,
    title: str = "Attention",
    path: str | os.PathLike[str] = "attention.html",
    overwrite: bool = False,
    serve: Literal[True],
    progress: bool | None = None,
    **options: Unpack[Options],
) -> ViewServer: ...
def view(
    query: Any,
    key: Any,
    *,
    tokens: Iterable[str] | None = None,
    query_tokens: Iterable[str] | None = None,
    head_names: Iterable[str] | None = None,
    title: str = "Attention",
    path: str | os.PathLike[str] = "attention.html",
    overwrite: bool = False,
    serve: bool = False,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Path | ViewServer:
    """Writes a page that shows attention, in one HTML file that needs nothing else, and returns its path.

    query (B, H, Sq, D), key (B, Hkv, Sk, D), or fewer axes; options as for attention. tokens has one text for each key,
    and for each query where there are as many; query_tokens are for other queries. Whatever a token holds is shown,
    never run. A small matrix is in the file whole; a large one as means and maxima of cells, so that the file stays
    below 5 MB. An existing file is an error unless overwrite is True.

    With serve=True nothing is written: the page comes from this machine, with every zoom level of every head computed
    when it is looked at, at any length. What returns has url, close() and, for scripts, wait(), which ends with Ctrl-C;
    query and key must stay as they are meanwhile. Arrays on a CUDA device stay there, and the page's parts are computed
    there.

    progress shows how far a long analysis is: None means on a terminal only. Ctrl-C leaves no file behind.

    >>> import numpy as np, headway, tempfile
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = headway.view(x, x, tokens="the cat sat down .".split(), path=f"{folder}/cat.html", causal=True)
    ...     page.name, page.stat().st_size > 10_000
    ('cat.html', True)
    """
    layer = _headway.view_layer(query, key, **options)
    lengths = [int(array.shape[-2]) if len(array.shape) > 1 else 0 for array in (query, key)]
    texts = Texts(title, tokens, query_tokens, head_names, *lengths)
    return show([layer], texts, path, overwrite, serve, progress)


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
    ) -> None:
        self.title = str(title)
        self.keys = _texts("tokens", tokens, keys)
        self.queries = _texts("query_tokens", query_tokens, queries)
        self.heads = _texts("head_names", head_names, None)


def _texts(name: str, given: Iterable[str] | None, count: int | None) -> list[str]:
    if given is None:
        return []
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
    path: str | os.PathLike[str],
    overwrite: bool,
    serve: bool,
    progress: bool | None,
) -> Path | ViewServer:
    """The page of some layers: a file, or a server."""
    words = (texts.title, texts.keys, texts.queries, texts.heads)
    if serve:
        return ViewServer(_headway.LiveView(list(layers), *words, progress))
    target = Path(os.fsdecode(path))
    _headway.write_view(list(layers), os.fsencode(target), *words, bool(overwrite), progress)
    return target
