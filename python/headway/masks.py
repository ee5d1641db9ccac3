"""Structured masks: which keys a query may see, in memory that grows with the tokens.

>>> import numpy as np, headway
>>> from headway import masks
>>> x = np.random.default_rng(0).standard_normal((1, 2, 6, 8))
>>> mask = masks.documents(lengths=[4, 2]) & masks.causal()
>>> print(mask)
documents(2 lengths) & causal(): 6 queries x 6 keys, 13 pairs, 36.1 %
■ · · · · ·
■ ■ · · · ·
■ ■ ■ · · ·
■ ■ ■ ■ · ·
· · · · ■ ·
· · · · ■ ■
>>> headway.attention(x, x, x, mask=mask).shape
(1, 2, 6, 8)

Masks are small values that combine with & and | and become spans of keys when the sizes are known: nothing of size
Sq x Sk is built, and only tiles with an allowed pair take time. They depend on the sizes only: lengths and the causal
option restrict them further, like an &. Queries and keys are aligned at their ends: offset = Sk - Sq. In packed calls
(attention_varlen) a mask is applied inside each sequence, at the sequence's own sizes. Arrays may be NumPy's or any
with DLPack; those on a GPU are copied to the host when the mask is made.

docs/masks.md has a drawing of each kind, and recipes.
"""

from __future__ import annotations

from typing import Any

from headway import _headway
from headway._arguments import shown, whole_number
from headway._headway import Mask

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "dense",
    "documents",
    "first",
    "from_block_mask",
    "from_bool",
    "prefix",
    "spans",
    "tree",
    "window",
]


def causal() -> Mask:
    """Keys up to the query's own position: j <= i + offset. The last query sees every key.

    >>> from headway import masks
    >>> print(masks.causal().draw(3, 5))
    causal(): 3 queries x 5 keys, 12 pairs, 80 %
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    """
    return _headway.mask_causal()


def window(left: int | None, right: int | None) -> Mask:
    """Keys near the query: i + offset - left <= j <= i + offset + right; None on a side is unlimited.

    >>> from headway import masks
    >>> print(masks.window(1, 1).draw(4, 4))
    window(1, 1): 4 queries x 4 keys, 10 pairs, 62.5 %
    ■ ■ · ·
    ■ ■ ■ ·
    · ■ ■ ■
    · · ■ ■
    """
    return _headway.mask_window((left, right))


def first(n: Any) -> Mask:
    """The first keys: j < n, cut to the number of keys. n is a number, or one for each batch item.

    >>> from headway import masks
    >>> print(masks.first(2).draw(3, 4))
    first(2): 3 queries x 4 keys, 6 pairs, 50 %
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ · ·
    """
    return _headway.mask_first(n)


def prefix(n: Any) -> Mask:
    """first(n) | causal(): every query sees the first n keys, its own, and those before it. n as for first.

    >>> from headway import masks
    >>> print(masks.prefix(3).draw(5, 5))
    prefix(3): 5 queries x 5 keys, 18 pairs, 72 %
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    >>> masks.prefix([3, 0]).pairs(5, 5)
    33
    """
    return _headway.mask_prefix(n)


def documents(ids: Any = None, key_ids: Any = None, *, lengths: Any = None) -> Mask:
    """Tokens with the same id see each other, wherever they are; a negative id sees nothing and is not seen.

    ids is (Sq,) or (B, Sq). If the keys are not the queries' own tokens, key_ids is (Sk,) or (B, Sk). Instead of ids,
    give the lengths of consecutive documents: (documents,), or (B, documents) padded with 0; tokens after the last
    document are padding.

    >>> from headway import masks
    >>> print(masks.documents([0, 0, 7, 0, -1]))
    documents(5 ids): 5 queries x 5 keys, 10 pairs, 40 %
    ■ ■ · ■ ·
    ■ ■ · ■ ·
    · · ■ · ·
    ■ ■ · ■ ·
    · · · · ·
    >>> masks.documents(lengths=[2, 3]).pairs(6, 6)
    13
    """
    if (ids is None) == (lengths is None):
        raise TypeError(f"masks.documents: found {'neither' if ids is None else 'both'} ids and lengths, expected one")
    if lengths is None:
        return _headway.mask_documents(ids, key_ids)
    if key_ids is not None:
        raise TypeError("masks.documents: found lengths and key_ids, expected ids with key_ids")
    return _headway.mask_documents_of(lengths)


def blocks(keep: Any, size: int | tuple[int, int]) -> Mask:
    """Blocks of queries see blocks of keys: bools (Nq, Nk), (H, Nq, Nk) or (B, H, Nq, Nk).

    size is that of a block on both sides, or a pair (queries, keys); the last blocks may be cut. The mask is stored as
    a list for each block of queries, also when it is combined with other blocks of the same size.

    >>> import numpy as np
    >>> from headway import masks
    >>> print(masks.blocks(np.array([[True, False], [True, True]]), 2))
    blocks(2 x 2 of 2): 4 queries x 4 keys, 12 pairs, 75 %
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ■
    ■ ■ ■ ■
    """
    sizes = size if isinstance(size, tuple) else (size, size)
    if len(sizes) != 2:
        raise ValueError(f"masks.blocks: size is {shown(size)}, expected a number or a pair (queries, keys)")
    query_size, key_size = (whole_number("masks.blocks", "size", one) for one in sizes)
    return _headway.mask_blocks(keep, query_size, key_size)


def tree(parents: Any) -> Mask:
    """Tokens of a tree, as in speculative decoding: a token sees itself, its ancestors and every key before the tree.

    The last Sq keys are the tree's tokens. parents is (Sq,) or (B, Sq): an earlier token, or -1 for a root.

    >>> from headway import masks
    >>> print(masks.tree([-1, 0, 0, 1]).draw(4, 6))
    tree(4 tokens): 4 queries x 6 keys, 16 pairs, 66.7 %
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    ■ ■ ■ · ■ ·
    ■ ■ ■ ■ · ■
    """
    return _headway.mask_tree(parents)


def spans(array: Any, rows: int = 1) -> Mask:
    """The given spans: integers (N, R, 2), (H, N, R, 2) or (B, H, N, R, 2), begin <= j < end.

    Each of the N entries applies to `rows` consecutive queries. Spans may overlap, be empty and come in any order.

    >>> from headway import masks
    >>> print(masks.spans([[[0, 1], [2, 4]], [[1, 3], [0, 0]]], rows=2).draw(4, 4))
    spans(2 x 2 for 2 rows): 4 queries x 4 keys, 10 pairs, 62.5 %
    ■ · ■ ■
    ■ · ■ ■
    · ■ ■ ·
    · ■ ■ ·
    """
    return _headway.mask_spans(array, whole_number("masks.spans", "rows", rows))


def dense(array: Any) -> Mask:
    """Bools (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), copied: True = attend.

    dense(x) & mask keeps the bools and the mask's spans side by side; dense(x) | mask converts both to bools.

    >>> import numpy as np
    >>> from headway import masks
    >>> print(masks.dense(np.eye(3, dtype=bool)) | masks.first(1))
    dense(3 x 3) | first(1): 3 queries x 3 keys, 5 pairs, 55.6 %
    ■ · ·
    ■ ■ ·
    ■ · ■
    """
    return _headway.mask_dense(array)


def from_bool(array: Any) -> Mask:
    """The spans of bools if they take less memory than the bools, else the same as dense.

    >>> import numpy as np
    >>> from headway import masks
    >>> masks.from_bool(np.tril(np.ones((64, 64), bool))).spans(64, 64)[0].shape
    (1, 1, 64, 1, 2)
    """
    return _headway.mask_from_bool(array)


def from_block_mask(block_mask: Any) -> Mask:
    """The mask of a torch BlockMask, as torch.nn.attention.flex_attention.create_block_mask makes it.

    Full blocks are converted directly; for partial blocks its mask_mod is evaluated once for each pair.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from headway import masks
    >>> causal = create_block_mask(lambda b, h, i, j: j <= i, 1, 1, 300, 300, device="cpu")
    >>> masks.from_block_mask(causal).pairs(300, 300) == masks.causal().pairs(300, 300)
    True
    """
    from headway._block_mask import mask_of

    return mask_of(block_mask)
