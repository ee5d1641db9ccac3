"""Headway for Keras 3, with the torch, JAX or NumPy backend.

MultiHeadAttention   a drop-in for keras.layers.MultiHeadAttention, with the same arguments, weights and files

>>> import numpy as np, headway.keras
>>> layer = headway.keras.MultiHeadAttention(num_heads=2, key_dim=4)
>>> x = np.ones((1, 3, 8), np.float32)
>>> tuple(layer(x, x, use_causal_mask=True).shape)
(1, 3, 8)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import keras
except ImportError as error:
    how = "pip install keras"
    if error.name is not None and error.name.partition(".")[0] != "keras":  # Keras is here, its backend is not
        how = "set KERAS_BACKEND to torch, jax or numpy before keras is imported"
    raise ImportError(
        f"headway.keras needs Keras 3, which cannot be imported here ({error}): {how}", name=error.name
    ) from error

if int(keras.__version__.split(".")[0]) < 3:
    raise ImportError(
        f"headway.keras needs Keras 3 or later, found {keras.__version__}: pip install 'keras>=3'", name="keras"
    )

from headway._headway import attention as _numpy_attention

__all__ = ["MultiHeadAttention"]


@keras.saving.register_keras_serializable(package="headway")
class MultiHeadAttention(keras.layers.MultiHeadAttention):  # type: ignore[misc]
    """keras.layers.MultiHeadAttention, computed by Headway: the same arguments, weights and saved models.

    No (T, S) matrix is stored but with return_attention_scores=True. What attends along several axes at once is left to
    Keras. One difference: a query that the masks leave no key for gives 0, where Keras gives the mean of all values.

    >>> import keras, numpy as np, headway.keras
    >>> original = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4)
    >>> ours = headway.keras.MultiHeadAttention(num_heads=2, key_dim=4)
    >>> x = np.random.default_rng(0).standard_normal((1, 5, 8), np.float32)
    >>> expected, _ = original(x, x), ours(x, x)
    >>> ours.set_weights(original.get_weights())
    >>> bool(np.allclose(keras.ops.convert_to_numpy(ours(x, x)), keras.ops.convert_to_numpy(expected), atol=1e-6))
    True
    """

    def _compute_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Any, Any]:
        """Query (B, T, N, H), key and value (B, S, N, H) -> (B, T, N, H), and the weights (B, N, T, S) if asked for."""
        if len(query.shape) != 4:
            return super()._compute_attention(  # type: ignore[no-any-return]
                query, key, value, attention_mask, training, return_attention_scores
            )
        options: dict[str, Any] = {"scale": self._inverse_sqrt_key_dim}
        if attention_mask is not None:
            mask: Any = keras.ops.cast(attention_mask, "bool")
            options["mask"] = keras.ops.expand_dims(mask, 1) if len(mask.shape) == 3 else mask
        if use_causal_mask:
            options["causal"] = "top_left"
        if training and self._dropout > 0:
            options |= {"dropout": float(self._dropout), "seed": _seed(self._dropout_layer.seed_generator.next())}
        attend = _attention()
        swapped = [keras.ops.swapaxes(x, 1, 2) for x in (query, key, value)]
        found = attend(*swapped, return_weights=return_attention_scores, **options)
        out, weights = found if return_attention_scores else (found, None)
        return keras.ops.swapaxes(out, 1, 2), weights


def _attention() -> Callable[..., Any]:
    """Headway's function for arrays of the backend that Keras runs on."""
    backend = keras.backend.backend()
    if backend == "torch":
        from headway.torch import attention

        return attention
    if backend == "jax":
        from headway.jax import attention as jax_attention

        return jax_attention
    if backend == "numpy":
        return _numpy_attention
    raise NotImplementedError(f"headway.keras: the backend is {backend}, expected torch, jax or numpy")


def _seed(drawn: Any) -> Any:
    """Two numbers of Keras's generator as a seed: for JAX a key, for others one number of 64 bits."""
    if keras.backend.backend() == "jax":
        return drawn
    numbers: Any = keras.ops.convert_to_numpy(drawn)
    high, low = map(int, numbers)
    return (high << 32 | low) % 2**64
