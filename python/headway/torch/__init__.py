"""Headway for PyTorch: the functions and modules that torch users have, computed by Headway, under autograd.

scaled_dot_product_attention        torch.nn.functional.scaled_dot_product_attention
MultiheadAttention                  torch.nn.MultiheadAttention; parameters and state_dict are the same
replace_attention                   swaps every torch.nn.MultiheadAttention inside a model, restore_attention undoes it
register_with_transformers          attn_implementation="headway" for Hugging Face models
tutorial.MultiHeadAttention         the tutorials' module, with nn.Linear W_q, W_k, W_v, W_o; also without `tutorial`
record                              what every attention layer of a model attends to, while it runs
attention, attention_varlen         headway.attention and headway.attention_varlen with gradients
activate, deactivate                torch's own scaled_dot_product_attention and varlen_attn, computed by Headway
flash_attn_func                     flash_attn.flash_attn_func, flash_attn_varlen_func and flash_attn_with_kvcache
rope                                headway.rope with a gradient

>>> import torch, headway.torch
>>> x = torch.randn(2, 8, 128, 64, requires_grad=True)
>>> headway.torch.attention(x, x, x, causal=True).sum().backward()
>>> x.grad.shape
torch.Size([2, 8, 128, 64])
"""

import os as _os

from headway import _headway
from headway._needs import need as _need

_need("headway.torch", "torch")

import torch as _torch

from headway.torch._rope import rope
from headway.torch.flash import flash_attn_func, flash_attn_varlen_func
from headway.torch.flash_cache import flash_attn_with_kvcache
from headway.torch.functional import attention, attention_varlen
from headway.torch.hugging_face import register_with_transformers
from headway.torch.multihead import MultiheadAttention
from headway.torch.recording import Recording, record
from headway.torch.route import activate, deactivate
from headway.torch.sdpa import scaled_dot_product_attention
from headway.torch.swap import replace_attention, restore_attention
from headway.torch.tutorial import MultiHeadAttention

# Torch's threads and ours would take the CPUs from each other: from now on calls run on torch's.
_headway.share_openmp_threads(_os.path.join(_os.path.dirname(_torch.__file__), "lib", "libtorch_cpu.so"))

__all__ = [
    "MultiHeadAttention",
    "MultiheadAttention",
    "Recording",
    "activate",
    "attention",
    "attention_varlen",
    "deactivate",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "record",
    "register_with_transformers",
    "replace_attention",
    "restore_attention",
    "rope",
    "scaled_dot_product_attention",
]
