"""Putting Headway into an existing model, and taking it out again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from headway.torch.multihead import MultiheadAttention

_Model = TypeVar("_Model", bound=nn.Module)

# Attributes that make torch's encoder bypass its attention module and call a fused operator.
_BYPASSES: dict[type[nn.Module], dict[str, Any]] = {
    nn.TransformerEncoder: {"use_nested_tensor": False},
    nn.TransformerEncoderLayer: {"activation_relu_or_gelu": 0},
}
_SAVED = "_before_headway"


def replace_attention(model: _Model) -> _Model:
    """Makes every torch.nn.MultiheadAttention inside the model a headway.torch.MultiheadAttention, in place.

    Parameters, buffers, hooks and optimizers' references stay what they are. nn.TransformerEncoder and its layers keep
    going through their attention module, also where torch would take a shortcut past it in inference. Subclasses of
    nn.MultiheadAttention, which compute something else, are left alone. A model without any is left as it is, with a
    warning. Returns the model; restore_attention undoes it.

    >>> import torch, headway.torch
    >>> layer = torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True)
    >>> model = headway.torch.replace_attention(torch.nn.TransformerEncoder(layer, num_layers=2))
    >>> model.layers[0].self_attn
    MultiheadAttention(
      embed_dim=32, num_heads=4, dropout=0.1, batch_first=True
      (out_proj): NonDynamicallyQuantizableLinear(in_features=32, out_features=32, bias=True)
    )
    >>> model(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """
    changed = _swap("replace_attention", model, nn.MultiheadAttention, MultiheadAttention)
    if not any(isinstance(module, MultiheadAttention) for module in model.modules()):
        warnings.warn(
            f"replace_attention: {type(model).__name__} has no torch.nn.MultiheadAttention, so nothing was replaced; "
            "Hugging Face models need register_with_transformers, functions activate",
            stacklevel=2,
        )
    return changed


def restore_attention(model: _Model) -> _Model:
    """Makes every headway.torch.MultiheadAttention inside the model a torch.nn.MultiheadAttention again, in place.

    >>> import torch, headway.torch
    >>> model = torch.nn.Transformer(d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, batch_first=True)
    >>> model = headway.torch.restore_attention(headway.torch.replace_attention(model))
    >>> any(isinstance(module, headway.torch.MultiheadAttention) for module in model.modules())
    False
    """
    return _swap("restore_attention", model, MultiheadAttention, nn.MultiheadAttention)


@contextmanager
def swapped(model: nn.Module) -> Iterator[None]:
    """replace_attention within a context: afterwards exactly the modules that it changed are torch's again."""
    changed = [module for module in model.modules() if type(module) is nn.MultiheadAttention]
    _swap("record", model, nn.MultiheadAttention, MultiheadAttention)
    try:
        yield
    finally:
        for module in changed:
            module.__class__ = nn.MultiheadAttention
        _set_bypasses(model)


def _swap(operation: str, model: _Model, old: type[nn.Module], new: type[nn.Module]) -> _Model:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{operation}: expected a torch.nn.Module, found {type(model).__name__}")
    for module in model.modules():
        if type(module) is old:
            module.__class__ = new  # one layout: what differs is forward
    _set_bypasses(model)
    return model


def _set_bypasses(model: nn.Module) -> None:
    for module in model.modules():
        for kind, values in _BYPASSES.items():
            if isinstance(module, kind):
                _set_bypass(module, values)


def _set_bypass(module: nn.Module, values: dict[str, Any]) -> None:
    """Disables torch's bypass of the attention modules inside if one of them is Headway's, else enables it again."""
    inside = any(isinstance(part, MultiheadAttention) for part in module.modules())
    saved = module.__dict__.get(_SAVED)
    if inside and saved is None:
        module.__dict__[_SAVED] = {name: module.__dict__[name] for name in values if name in module.__dict__}
        module.__dict__.update({name: value for name, value in values.items() if name in module.__dict__})
    elif not inside and saved is not None:
        module.__dict__.update(module.__dict__.pop(_SAVED))
