"""Suggestions for keywords that do not exist."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The names that other libraries use for the same options.
_ELSEWHERE = {
    "K": "key",
    "Q": "query",
    "V": "value",
    "attn_bias": "bias",
    "attn_mask": "mask",
    "attention_mask": "mask",
    "average_attn_weights": "return_weights",
    "dropout_p": "dropout",
    "dropout_rate": "dropout",
    "is_causal": "causal",
    "k": "key",
    "key_value_seq_lengths": "valid_lens",
    "local_window_size": "window",
    "logits_soft_cap": "softcap",
    "need_weights": "return_weights",
    "q": "query",
    "query_seq_lengths": "query_lens",
    "return_attn_probs": "return_weights",
    "rng_seed": "seed",
    "seqused_k": "valid_lens",
    "sliding_window": "window",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "v": "value",
    "window_size": "window",
}


def hint(name: str, known: list[str]) -> str:
    """'; did you mean ...?', or '' where nothing is close."""
    # In both directions: the drop-ins use the other names.
    same = [_ELSEWHERE.get(name), *(theirs for theirs, ours in _ELSEWHERE.items() if ours == name)]
    close = [word for word in same if word in known] or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def suggests_keywords(function: _Function) -> _Function:
    """The function, answering a keyword that it does not have with the one that was probably meant."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'{hint(name, known)}")
        return function(*arguments, **keywords)

    return call  # type: ignore[return-value]
