"""Headway in NumPy: attention, its gradients, what would run and why, and a layer that learns.

pip install .
python examples/python/numpy_attention.py
"""

import numpy as np

import headway

rng = np.random.default_rng(0)

# ---- Attention: (batch, heads, length, width) ----

query = rng.standard_normal((2, 8, 100, 64), dtype=np.float32)
key, value = rng.standard_normal((2, 2, 2, 100, 64), dtype=np.float32)  # 2 heads of keys serve 8 of queries
out, lse = headway.attention(query, key, value, causal=True, window=(32, 0), return_lse=True)
print("attention", out.shape, out.dtype)

gradients = headway.attention_backward(np.ones_like(out), query, key, value, out, lse, causal=True, window=(32, 0))
print(gradients)

# ---- A batch of sentences of different lengths: no NaN, whatever the padding holds ----

lengths = np.array([100, 37])
key[1, :, 37:] = np.nan
padded = headway.attention(query, key, value, valid_lens=lengths)
assert np.isfinite(padded).all()

# ---- What would run, and why ----

print(headway.explain(query, key, value, causal=True))

# ---- A layer learns to copy the first position to all ----

np.random.seed(0)
layer = headway.MultiHeadAttention(num_hiddens=16, num_heads=4)
for name in ("W_q", "W_k", "W_v", "W_o"):
    setattr(layer, name, 0.3 * np.random.randn(16, 16))
positions = np.random.randn(12, 16)
first_loss = None
for step in range(300):
    x = np.random.randn(8, 12, 16) + positions
    error = layer.forward(x, x, x) - x[:, :1]
    loss = (error**2).mean()
    first_loss = first_loss or loss
    for name, gradient in layer.backward(2 * error / error.size).items():
        if name.startswith("W"):
            setattr(layer, name, getattr(layer, name) - 0.5 * gradient)
    if step % 100 == 0 or step == 299:
        print(f"step {step:3d}   loss {loss:.3f}")
assert loss < first_loss / 2
