"""Which keyword was meant by one that does not exist."""

from __future__ import annotations

import difflib

# The same things under the names that other libraries give them.
_ELSEWHERE = {
    "attn_bias": "bias",
    "attn_mask": "mask",
    "attention_mask": "mask",
    "average_attn_weights": "return_weights",
    "dropout_p": "dropout",
    "dropout_rate": "dropout",
    "is_causal": "causal",
    "key_value_seq_lengths": "valid_lens",
    "local_window_size": "window",
    "logits_soft_cap": "softcap",
    "need_weights": "return_weights",
    "query_seq_lengths": "query_lens",
    "return_attn_probs": "return_weights",
    "rng_seed": "seed",
    "seqused_k": "valid_lens",
    "sliding_window": "window",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "window_size": "window",
}


def hint(name: str, known: list[str]) -> str:
    """'; did you mean ...?', or '' where nothing is close."""
    elsewhere = _ELSEWHERE.get(name)
    close = [elsewhere] if elsewhere in known else difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
