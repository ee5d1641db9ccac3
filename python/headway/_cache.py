"""The KV cache."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from headway import _headway
from headway._arguments import flag, path_bytes, shown, whole_number
from headway._errors import named
from headway._rope import settings_of

_DTYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
_ROPE_KEYS = ("base", "dims", "interleaved", "scaling")

Ids = int | Sequence[int] | Any


class KVCache:
    """Keys and values of many sequences in pages of one size, and attention over them.

    pages, page_size     the number of pages for all sequences together, and of tokens in a page
    kv_heads, head_dim   of the keys; value_dim of the values, if it differs
    dtype                of keys, values and queries: "float32", "float64", "bfloat16" or "float16"
    device               None or "cpu"; or "cuda", "cuda:1" and so on; keys, values and queries must then be there
    quantize             "int8" or "fp8" (e4m3): pages of 8 bits with a scale for each token and head
    rope                 a dict of rope's base, dims, interleaved and scaling, or a scaling dict alone: keys are rotated
                         to their positions when they are appended, queries in attend
    window, first        (left, right), or left alone: a query at position p sees the keys from p - left on, and always
                         the first ones. append begins by freeing the pages that no later query can see
    slack                the number of further keys to keep, for truncate
    value_in_key         values are this many first numbers of the keys, stored once: append takes no value

    A result is, bit for bit on the CPU, what attention gives on the sequence's own keys and values: in any batch, paged
    or not, forked or not (on a GPU with batch_invariant). Errors come before anything changes: OutOfPages (a
    MemoryError), KeyError for an unknown sequence. Several threads may use one cache.

    >>> import numpy as np, headway
    >>> cache = headway.KVCache(pages=64, page_size=16, kv_heads=2, head_dim=8)
    >>> key, value, query = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 8), dtype=np.float32)
    >>> id = cache.add()
    >>> cache.append(id, key, value)
    >>> out = cache.attend(id, query)
    >>> np.array_equal(out, headway.attention(query, key, value, causal=True))
    True
    >>> cache
    KVCache(64 pages of 16 tokens, 63 free, 1 sequence, 2 heads of 8, float32)
    """

    __slots__ = ("__weakref__", "_cache")

    def __init__(
        self,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = "float32",
        device: Any = None,
        quantize: str | None = None,
        rope: Mapping[str, Any] | None = None,
        window: int | tuple[int | None, int | None] | None = None,
        first: int = 0,
        slack: int = 0,
        value_in_key: int | None = None,
    ) -> None:
        numbers = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        numbers |= {"first": first, "slack": slack}
        optional = {"value_dim": value_dim, "value_in_key": value_in_key}
        settings: dict[str, Any] = {name: _whole(name, value) for name, value in numbers.items()}
        settings |= {name: None if value is None else _whole(name, value) for name, value in optional.items()}
        settings |= {"dtype": _dtype(dtype), "quantize": _format(quantize), "window": _window(window)}
        settings["rope"] = _rope(rope, settings["head_dim"])
        settings["device"] = _device("KVCache", device)
        self._cache = _headway.Cache(settings)

    # ---- Sequences ----

    def add(self) -> int:
        """Makes an empty sequence and returns its id, which is never used again.

        >>> import headway
        >>> cache = headway.KVCache(pages=4, page_size=16, kv_heads=2, head_dim=8)
        >>> cache.add(), cache.add()
        (0, 1)
        """
        return self._cache.add()

    def fork(self, id: int) -> int:
        """Makes a second sequence with the same tokens and pages; a page is copied when either of them writes to it.

        >>> import numpy as np, headway
        >>> cache = headway.KVCache(pages=8, page_size=4, kv_heads=1, head_dim=2)
        >>> prompt = cache.add()
        >>> cache.append(prompt, np.ones((1, 1, 4, 2), np.float32), np.ones((1, 1, 4, 2), np.float32))
        >>> answer = cache.fork(prompt)
        >>> cache.length(answer), cache.free_pages
        (4, 7)
        """
        return self._cache.fork(_id("fork", id))

    def truncate(self, id: int, length: int) -> None:
        """Removes the tokens from `length` on. ValueError if the next query would see keys that a window freed.

        >>> import numpy as np, headway
        >>> cache = headway.KVCache(pages=8, page_size=4, kv_heads=1, head_dim=2)
        >>> id = cache.add()
        >>> cache.append(id, np.ones((1, 1, 6, 2), np.float32), np.ones((1, 1, 6, 2), np.float32))
        >>> cache.truncate(id, 3)  # of six tokens that a draft model proposed, three were accepted
        >>> cache.length(id), cache.free_pages
        (3, 7)
        """
        self._cache.truncate(_id("truncate", id), _whole("length", length, "KVCache.truncate"))

    def remove(self, id: int) -> None:
        """Removes the sequence; pages that no other sequence shares become free.

        >>> import headway
        >>> cache = headway.KVCache(pages=4, page_size=16, kv_heads=2, head_dim=8)
        >>> id = cache.add()
        >>> cache.remove(id)
        >>> cache.ids
        []
        """
        self._cache.remove(_id("remove", id))

    def length(self, id: int) -> int:
        """The number of tokens of a sequence, including those that a window freed."""
        return self._cache.length(_id("length", id))

    @property
    def ids(self) -> list[int]:
        """The ids of the sequences, in the order in which they were made."""
        return self._cache.ids()

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence uses."""
        return self._cache.free_pages()

    @property
    def config(self) -> dict[str, Any]:
        """The settings, with value_dim set."""
        config = self._cache.described()
        config["dtype"] = next(name for name, short in _DTYPES.items() if short == config["dtype"])
        config["quantize"] = None if config["quantize"] == "plain" else config["quantize"]
        config["device"] = "cpu" if config["device"] < 0 else f"cuda:{config['device']}"
        return config

    # ---- Tokens ----

    def append(self, ids: Ids, key: Any, value: Any = None, *, cu_seqlens: Any = None) -> None:
        """Adds tokens at the ends of sequences; each sequence may occur once.

        ids          B of them, or one
        key, value   (B, Hkv, S, D) and (B, Hkv, S, Dv): S tokens for each
        cu_seqlens   (B + 1,) integers: key and value are then packed, (total, Hkv, D), and sequence b gets the rows
                     from cu_seqlens[b] to cu_seqlens[b + 1]

        >>> import numpy as np, headway
        >>> cache = headway.KVCache(pages=8, page_size=4, kv_heads=1, head_dim=2)
        >>> a, b = cache.add(), cache.add()
        >>> rows = np.ones((5, 1, 2), np.float32)
        >>> cache.append([a, b], rows, rows, cu_seqlens=[0, 2, 5])
        >>> cache.length(a), cache.length(b), cache.free_pages
        (2, 3, 6)
        """
        self._cache.append(ids, key, value, cu_seqlens)

    def attend(self, ids: Ids, query: Any, **options: Any) -> Any:
        """Attention of queries over their sequences' keys; the queries are the last tokens of their sequences.

        ids          B of them, or one
        query        (B, H, Sq, D) -> (B, H, Sq, Dv)
        cu_seqlens   (B + 1,) integers: query is then packed, (total, H, D)
        causal       "bottom_right" by default: a query sees the keys up to its own; False: all keys
        window, spans, query_lens, scale, softcap, alibi_slopes, sinks, engine, batch_invariant, layout   as for
                     attention; a cache's own window needs no window here
        return_lse   gives (out, lse (B, H, Sq), packed (H, total))
        out          an array to write to

        >>> import numpy as np, headway
        >>> cache = headway.KVCache(pages=8, page_size=4, kv_heads=1, head_dim=2)
        >>> id = cache.add()
        >>> cache.append(id, np.zeros((1, 1, 3, 2), np.float32), np.float32([[[[1, 0], [2, 0], [6, 0]]]]))
        >>> cache.attend(id, np.zeros((1, 4, 1, 2), np.float32))[0, :, 0, 0].round(4)
        array([3., 3., 3., 3.], dtype=float32)
        """
        return _headway.attend_cache(self._cache, ids, query, **options)

    def read(self, id: int, begin: int = 0, end: int | None = None) -> tuple[Any, Any]:
        """Keys (Hkv, S, D) and values (Hkv, S, Dv) of tokens begin to end as attend reads them, in NumPy.

        Rotated if the cache rotates keys; 8-bit and bfloat16 pages as float32. On a GPU it waits for the default
        stream; synchronize other streams before.

        >>> import numpy as np, headway
        >>> cache = headway.KVCache(pages=8, page_size=4, kv_heads=1, head_dim=2, quantize="int8")
        >>> id = cache.add()
        >>> rows = np.float32([[[[1, 0.3]]]])
        >>> cache.append(id, rows, rows)
        >>> cache.read(id)[0].round(4)
        array([[[1.    , 0.2992]]], dtype=float32)
        """
        id = _id("read", id)
        last = self._cache.length(id) if end is None else _whole("end", end, "KVCache.read")
        return self._cache.read(id, _whole("begin", begin, "KVCache.read"), last)

    # ---- Files ----

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Writes sequences, with their ids, and the pages that they hold, as .safetensors."""
        with named("KVCache.save"):
            self._cache.save(path_bytes("KVCache.save", path), flag("KVCache.save", "overwrite", overwrite))

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: Any = None) -> KVCache:
        """The cache that save wrote, on a device. OSError for an invalid file, before anything is allocated.

        >>> import headway, os, tempfile
        >>> cache = headway.KVCache(pages=4, page_size=16, kv_heads=2, head_dim=8)
        >>> id = cache.add()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "cache.safetensors")
        ...     cache.save(path)
        ...     headway.KVCache.load(path).ids
        [0]
        """
        cache = cls.__new__(cls)
        target, index = path_bytes("KVCache.load", path), _device("KVCache.load", device)
        with named("KVCache.load"):
            cache._cache = _headway.Cache.load(target, index)
        return cache

    def __repr__(self) -> str:
        config, count = self.config, len(self.ids)
        parts = [f"{config['pages']} pages of {config['page_size']} tokens", f"{self.free_pages} free"]
        parts += [f"{count} sequence{'' if count == 1 else 's'}", f"{config['kv_heads']} heads of {config['head_dim']}"]
        parts += [config["dtype"], *([config["quantize"]] if config["quantize"] else [])]
        return f"KVCache({', '.join(parts)})"


def _whole(name: str, value: Any, operation: str = "KVCache") -> int:
    return whole_number(operation, name, value)


def _id(method: str, value: Any) -> int:
    try:
        return whole_number(f"KVCache.{method}", "id", value, "the integer that add() gave")
    except ValueError:
        raise KeyError(f"KVCache.{method}: there is no sequence {shown(value)}") from None


def _dtype(dtype: Any) -> str:
    """float32, "float32", numpy.float32, torch.float32: the name is what counts."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    short = _DTYPES.get(name.rpartition(".")[2])
    if short is None:
        raise TypeError(f"KVCache: dtype is {shown(dtype)}, expected {', '.join(map(repr, _DTYPES))}")
    return short


def _format(quantize: str | None) -> str:
    if quantize is not None and (not isinstance(quantize, str) or quantize not in ("int8", "fp8")):
        error = ValueError if isinstance(quantize, str) else TypeError
        raise error(f"KVCache: quantize is {shown(quantize)}, expected None, 'int8' or 'fp8'")
    return quantize or "plain"


def _window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if hasattr(window, "__index__") and getattr(window, "ndim", 0) == 0:
        return _whole("window", window), 0
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        error = ValueError if isinstance(window, Sequence) and not isinstance(window, str) else TypeError
        raise error(
            f"KVCache: window is {shown(window)}, expected an integer or a pair (left, right) of integers or None"
        )
    left, right = (None if side is None else _whole("window", side) for side in window)
    return left, right


def _rope(rope: Any, head_dim: int) -> dict[str, Any] | None:
    if rope is None:
        return None
    if not isinstance(rope, Mapping):
        raise TypeError(f"KVCache: rope is a {type(rope).__name__}, expected a dict of rope's arguments")
    unknown = [key for key in rope if key not in _ROPE_KEYS]
    given: dict[str, Any] = {"scaling": rope} if unknown else dict(rope)  # else a dict as Hugging Face configs have it
    scaling = given.get("scaling")
    if isinstance(scaling, Mapping) and "dynamic" in (scaling.get("rope_type"), scaling.get("type")):
        raise ValueError(
            "KVCache: dynamic rope scaling depends on the length of the text, and keys are rotated once: "
            "expected another"
        )
    return settings_of(
        "KVCache", head_dim, given.get("base", 10000.0), given.get("dims"), given.get("interleaved", False), scaling
    )


def _device(operation: str, device: Any) -> int:
    """The number of a CUDA device, -1 for host memory: from None, "cpu", "cuda", "cuda:1", torch.device."""
    kind, _, index = ("cpu" if device is None else str(device)).partition(":")
    if kind == "cpu":
        return -1
    if kind in ("cuda", "gpu") and (not index or (index.isdecimal() and len(index) <= 9)):
        return int(index or 0)
    raise ValueError(f"{operation}: device is {shown(device)}, expected None, 'cpu', 'cuda' or 'cuda:' and a number")
