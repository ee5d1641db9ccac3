"""Exact, fast, explainable multi-head attention for NumPy, and for any array with DLPack.

attention(query, key, value, ...)     attention and every option of it
attention_backward, attention_scores  its gradients, its score matrix
attention_varlen, ..._backward        the same over packed sequences
attention_paged, KVCache, rope        serving: keys and values in pages, and rotary positions
explain                               what a call would run, and why
analyze, weights_in, mean_weights     what attention does, at lengths where nobody can store its matrix
trace                                 every step of a small call with its numbers, to read or to step through
view, plot_heads, plot_row            the same to look at: a page, and figures for reports
multi_head_attention, self_attention, compute_qkv, MultiHeadAttention
                                      the functions and the layer of the tutorials, in NumPy
masks                                 structured masks: documents, prefixes, windows, trees, blocks, joined by & and |
convert                               weights from torch, Keras and Flax in that layer, and back
headway.torch                         PyTorch: attention with gradients, drop-ins, Hugging Face, record
headway.jax, headway.flax             the same inside JAX programs, and drop-ins for Flax
headway.keras                         a layer for Keras 3
                                      (these four are imported when they are first used)

>>> import numpy as np, headway
>>> x = np.random.default_rng(0).standard_normal((2, 8, 128, 64), dtype=np.float32)
>>> headway.attention(x, x, x, causal=True).shape
(2, 8, 128, 64)
"""

import importlib as _importlib
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from headway import convert, masks
from headway._cache import KVCache
from headway._errors import OutOfPages
from headway._headway import (
    Plan,
    __version__,
    analyze,
    attention,
    attention_backward,
    attention_paged,
    attention_scores,
    attention_varlen,
    attention_varlen_backward,
    explain,
    mean_weights,
    weights_in,
)
from headway._page import Page
from headway._plots import plot_heads, plot_row
from headway._results import Analysis, Gradients
from headway._rope import rope, rope_backward, rope_frequencies
from headway._server import ViewServer
from headway._settings import engines, get_threads, release_memory, set_threads
from headway._trace import Trace, TraceStep, trace
from headway._view import view
from headway.functions import compute_qkv, multi_head_attention, self_attention
from headway.layer import MultiHeadAttention

if _TYPE_CHECKING:
    from types import ModuleType

    from headway import flax as flax
    from headway import jax as jax
    from headway import keras as keras
    from headway import torch as torch

_FRAMEWORKS = ("flax", "jax", "keras", "torch")

# Where names are that people look for here.
_ELSEWHERE = {
    "MultiheadAttention": "headway.torch",
    "activate": "headway.torch",
    "dot_product_attention": "headway.jax and headway.flax",
    "flash_attn_func": "headway.torch",
    "flash_attn_varlen_func": "headway.torch",
    "record": "headway.torch",
    "register_with_transformers": "headway.torch",
    "replace_attention": "headway.torch",
    "scaled_dot_product_attention": "headway.torch",
}

__all__ = [
    "Analysis",
    "Gradients",
    "KVCache",
    "MultiHeadAttention",
    "OutOfPages",
    "Page",
    "Plan",
    "Trace",
    "TraceStep",
    "ViewServer",
    "__version__",
    "analyze",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_scores",
    "attention_varlen",
    "attention_varlen_backward",
    "compute_qkv",
    "convert",
    "engines",
    "explain",
    "get_threads",
    "masks",
    "mean_weights",
    "multi_head_attention",
    "plot_heads",
    "plot_row",
    "release_memory",
    "rope",
    "rope_backward",
    "rope_frequencies",
    "self_attention",
    "set_threads",
    "trace",
    "view",
    "weights_in",
]


def __getattr__(name: str) -> "ModuleType":
    """headway.torch, headway.jax, headway.flax and headway.keras, imported when they are first used."""
    if name in _FRAMEWORKS:
        try:
            return _importlib.import_module(f"headway.{name}")
        except ImportError as error:  # help(), inspect and hasattr() expect no other error than AttributeError
            raise AttributeError(str(error)) from error
    found = f"module 'headway' has no attribute '{name}'"
    if name in _ELSEWHERE:
        raise AttributeError(f"{found}; it is in {_ELSEWHERE[name]}")
    # With its name and module the error suggests the nearest attribute where it is printed.
    raise AttributeError(found, name=name, obj=_sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *_FRAMEWORKS})
