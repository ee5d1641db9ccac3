"""Options of a split sequence on a device: those of the whole, cut to the parts that a rank computes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway import _headway
from headway._headway import Mask

Rows = tuple[int, int]

# Those of the whole sequence, the same on every rank.
SHARED = (
    "causal", "window", "valid_lens", "query_lens", "spans", "span_rows", "scale", "softcap", "alibi_slopes", "sinks",
)  # fmt: skip
# With the rows of this rank's queries, or one for all.
OWN = ("mask", "bias")


def refuse_unsupported(given: dict[str, Any]) -> None:
    """NotImplementedError for options that are only supported in host memory so far."""
    for name in given:
        if name not in (*SHARED, *OWN):
            raise NotImplementedError(f"attention: {name} over a split sequence works in host memory, not on a GPU")
    lengths = [name for name in ("valid_lens", "query_lens") if given.get(name) is not None]
    if given.get("causal") == "bottom_right" and any(torch.as_tensor(given[name]).dim() == 1 for name in lengths):
        raise NotImplementedError(
            f"attention: {lengths[0]} with causal='bottom_right' works in host memory, not on a GPU"
        )


def fact(x: Any) -> Any:
    """What ranks compare: numbers, or a digest of many of them."""
    if isinstance(x, Mask):
        return str(x)
    if hasattr(x, "tolist"):  # a tensor or an array
        x = torch.as_tensor(x)
        if x.numel() <= 64:
            return x.tolist()
        plain = x.detach().cpu().contiguous()
        return f"{list(x.shape)} {hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]}"
    return list(x) if isinstance(x, (tuple, list)) else x


class SplitOptions:
    """sizes are those of the whole: (batch, heads, kv heads, queries, keys, ...)."""

    def __init__(
        self, given: dict[str, Any], queries: Sequence[Rows], sizes: Sequence[int], device: torch.device
    ) -> None:
        self.queries, self.sizes, self.device = queries, sizes, device
        self.plain = {name: given[name] for name in ("causal", "window", "scale", "softcap") if name in given}
        self.arrays = {
            name: torch.as_tensor(given[name], device=device)
            for name in ("valid_lens", "query_lens", "spans", "alibi_slopes", "mask", "bias")
            if name in given and not isinstance(given[name], Mask)
        }
        self.span_rows = given.get("span_rows", 1)
        if isinstance(given.get("mask"), Mask):
            self._add_structured(given["mask"])
        if "spans" in self.arrays:
            spans = self.arrays["spans"].repeat_interleave(self.span_rows, -3)[..., : sizes[3], :, :]
            self.arrays["spans"] = spans.reshape((1,) * (5 - spans.dim()) + spans.shape)
        for name in OWN:
            if name in self.arrays:
                matrix = self.arrays[name]
                self.arrays[name] = matrix.reshape((1,) * (4 - matrix.dim()) + matrix.shape)
        sinks = given.get("sinks")
        self.sinks = None if sinks is None else torch.as_tensor(sinks, device=device)

    def _add_structured(self, mask: Mask) -> None:
        if "spans" in self.arrays:
            raise ValueError(
                "attention: found spans and a structured mask, expected one: masks.spans(array) & mask joins them"
            )
        spans, self.span_rows, bools = _headway.mask_parts(mask, self.sizes[3], self.sizes[4])
        if spans is not None:
            self.arrays["spans"] = torch.from_numpy(spans).to(self.device)
        if bools is not None:
            rows = [torch.arange(begin, end) for begin, end in self.queries]
            whole = torch.from_numpy(bools)
            own = (
                whole if whole.shape[-2] == 1 else whole[..., torch.cat([torch.empty(0, dtype=torch.int64), *rows]), :]
            )
            self.arrays["mask"] = own.to(self.device)

    def seen(self) -> dict[str, Any]:
        """What says which keys are sent; dense masks do not."""
        found = {name: self.plain[name] for name in ("causal", "window") if name in self.plain}
        for name in ("valid_lens", "query_lens"):
            if name in self.arrays:
                found[name] = self.arrays[name].tolist()
        if "spans" in self.arrays:
            found["spans"] = self.arrays["spans"].cpu()
        return found

    def own_rows(self, tensor: Tensor, rows: Rows) -> Tensor:
        """Of a tensor with this rank's queries along axis 2, or one row for all."""
        if tensor.shape[2] == 1 and sum(end - begin for begin, end in self.queries) != 1:
            return tensor
        at = 0
        for begin, end in self.queries:
            if begin <= rows[0] and rows[1] <= end:
                return tensor.narrow(2, at + rows[0] - begin, rows[1] - rows[0])
            at += end - begin
        raise AssertionError(rows)

    def columns(self, matrix: Tensor, keys: Rows) -> Tensor:
        """Of a matrix over all keys, or with one column for all."""
        return matrix if matrix.shape[3] == 1 else matrix.narrow(3, keys[0], keys[1] - keys[0])

    def of_part(self, queries: Rows, keys: Rows) -> dict[str, Any]:
        """Of a call with these rows; the offset is given beside them, and a sink counts once, at the end."""
        options = dict(self.plain)
        if options.get("causal"):
            options["causal"] = "top_left"  # the offset says how the whole is aligned
        count, width = queries[1] - queries[0], keys[1] - keys[0]
        for name, x in self.arrays.items():
            if name in OWN:
                options[name] = self.columns(self.own_rows(x, queries), keys)
            elif name == "query_lens":
                options[name] = (x - queries[0]).clamp(0, count)
            elif name == "valid_lens":
                rows = x if x.dim() == 1 else x.narrow(1, queries[0], count)
                options[name] = (rows - keys[0]).clamp(0, width)
            elif name == "spans":
                rows = x if x.shape[2] == 1 and self.sizes[3] != 1 else x.narrow(2, queries[0], count)
                options[name] = (rows - keys[0]).clamp(0, width)
            else:
                options[name] = x
        return options

    def sink_scores(self, like: Tensor) -> Tensor:
        """Of this rank's rows, as their lse (B, H, Sq_r); padding has no sink."""
        assert self.sinks is not None
        scores = self.sinks.to(like.dtype)[:, None].expand(like.shape)
        if "query_lens" not in self.arrays:
            return scores
        rows = torch.cat([torch.arange(begin, end, device=self.device) for begin, end in self.queries])
        return scores.where(rows < self.arrays["query_lens"][:, None, None], float("-inf"))
