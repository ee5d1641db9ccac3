"""Exact, fast, explainable multi-head attention for NumPy, and for any array with DLPack.

attention(query, key, value, ...)     attention and every option of it
attention_backward, attention_scores  its gradients, its score matrix
attention_varlen, ..._backward        the same over packed sequences
explain                               what a call would run, and why
analyze, weights_in, mean_weights     what attention does, at lengths where nobody can store its matrix
trace                                 every step of a small call with its numbers, to read or to step through
view, plot_heads, plot_row            the same to look at: a page, and figures for reports
multi_head_attention, self_attention, compute_qkv, MultiHeadAttention
                                      the functions and the layer of the tutorials, in NumPy
convert                               weights from torch, Keras and Flax in that layer, and back
headway.jax, headway.flax             the same inside JAX programs, and drop-ins; imported when asked for

>>> import numpy as np, headway
>>> x = np.random.default_rng(0).standard_normal((2, 8, 128, 64), dtype=np.float32)
>>> headway.attention(x, x, x, causal=True).shape
(2, 8, 128, 64)
"""

from headway import convert
from headway._headway import (
    Plan,
    __version__,
    analyze,
    attention,
    attention_backward,
    attention_scores,
    attention_varlen,
    attention_varlen_backward,
    explain,
    mean_weights,
    weights_in,
)
from headway._plots import plot_heads, plot_row
from headway._results import Analysis, Gradients
from headway._server import ViewServer
from headway._settings import engines, get_threads, set_threads
from headway._trace import Trace, TraceStep, trace
from headway._view import view
from headway.functions import compute_qkv, multi_head_attention, self_attention
from headway.layer import MultiHeadAttention

__all__ = [
    "Analysis",
    "Gradients",
    "MultiHeadAttention",
    "Plan",
    "Trace",
    "TraceStep",
    "ViewServer",
    "__version__",
    "analyze",
    "attention",
    "attention_backward",
    "attention_scores",
    "attention_varlen",
    "attention_varlen_backward",
    "compute_qkv",
    "convert",
    "engines",
    "explain",
    "get_threads",
    "mean_weights",
    "multi_head_attention",
    "plot_heads",
    "plot_row",
    "self_attention",
    "set_threads",
    "trace",
    "view",
    "weights_in",
]
