"""Headway in PyTorch: the function, the module, a model that is already there."""

import torch
import torch.nn.functional as F

import headway.torch
from headway.torch import MultiheadAttention, replace_attention, scaled_dot_product_attention

torch.manual_seed(0)

# 1. The function: one name changes.
query, key, value = torch.randn(3, 2, 8, 128, 64, requires_grad=True).unbind()
out = scaled_dot_product_attention(query, key, value, is_causal=True)
torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, is_causal=True), atol=1e-5, rtol=0)
print("function  ", tuple(out.shape), "as torch's")

# 2. What torch's function has no argument for, with gradients: a window, sinks, a soft cap, a learnt bias.
bias, sinks = torch.zeros(8, 128, 128, requires_grad=True), torch.zeros(8, requires_grad=True)
out = headway.torch.attention(query, key, value, causal=True, window=(32, 0), softcap=20.0, bias=bias, sinks=sinks)
out.square().mean().backward()
print("options   ", "bias gradient", tuple(bias.grad.shape), "sinks gradient", tuple(sinks.grad.shape))

# 3. The module: the same constructor, the same parameters; weights only when they are asked for.
layer = MultiheadAttention(embed_dim=64, num_heads=4, batch_first=True)
torch.nn.MultiheadAttention(64, 4, batch_first=True).load_state_dict(layer.state_dict())
x = torch.randn(2, 10, 64)
padding = torch.arange(10) >= torch.tensor([[10], [0]])  # the second sequence has no keys at all
out, weights = layer(x, x, x, key_padding_mask=padding)
print("module    ", tuple(out.shape), tuple(weights.shape), "NaN:", bool(out.isnan().any()))

# 4. A model that is already there: its attention swapped in place.
encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True), 2).eval()
expected = encoder(x)
found = replace_attention(encoder)(x)
print("model     ", "largest difference", f"{(found - expected).abs().max().item():.1e}")
