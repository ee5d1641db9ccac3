"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headway import _headway
from headway._arguments import flag, real_number, shown, whole_number

# Keys of a scaling dict, as Hugging Face configs spell them, and the settings that they become.
_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "seq_len": "length",
    "length": "length",
}
_OTHERS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings", "finetuned")
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor", "length", "original_length"),
    "yarn": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
}
_WHOLE = ("original_length", "length")


def rope(
    x: Any,
    positions: Any,
    *,
    base: float = 10000.0,
    dims: int | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
    out: Any | None = None,
) -> Any:
    """Rotates pairs of each row's numbers by the row's position times the pair's frequency.

    x            (..., S, D): float32, float64, bfloat16 or float16; NumPy's or any with DLPack, and so is the result
    positions    (S,) integers, or (B, S) where x is (B, ..., S, D)
    base         pair n turns by position * base**(-2n / dims)
    dims         the first dims numbers of a row are rotated, the others stay; all by default
    interleaved  pairs are (2n, 2n + 1); by default (n, n + dims / 2)
    scaling      a dict as in Hugging Face configs: "rope_type" (or "type") is "default", "linear", "yarn", "llama3" or
                 "dynamic"; the last depends on the length of the text, which "seq_len" gives. "rope_theta" and
                 "partial_rotary_factor" stand for base and dims where these are not given
    out          an array to write to; it may be x

    Angles are computed in float64, the rotation in float32 (of float64 in float64), and the result is rounded once.

    >>> import numpy as np, headway
    >>> x = np.array([[1.0, 0.0], [1.0, 0.0]])
    >>> headway.rope(x, [0, 1]).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    >>> scaling = {"rope_type": "linear", "factor": 2.0}
    >>> headway.rope(x, [0, 2], scaling=scaling).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """
    return _headway.rotate(x, positions, _settings("rope", x, base, dims, interleaved, scaling), False, out)


def rope_backward(
    grad_out: Any,
    positions: Any,
    *,
    base: float = 10000.0,
    dims: int | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
    out: Any | None = None,
) -> Any:
    """The gradient of sum(grad_out * rope(x, ...)) with respect to x: grad_out rotated back, arguments as for rope.

    >>> import numpy as np, headway
    >>> x = np.random.default_rng(0).standard_normal((5, 8))
    >>> bool(np.allclose(headway.rope_backward(headway.rope(x, range(5)), range(5)), x))
    True
    """
    settings = _settings("rope_backward", grad_out, base, dims, interleaved, scaling)
    return _headway.rotate(grad_out, positions, settings, True, out)


def rope_frequencies(
    head_dim: int,
    *,
    base: float = 10000.0,
    dims: int | None = None,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, float]:
    """The angle of each pair for one position, float64 (dims / 2,), and the factor of cosines and sines (yarn's).

    >>> import headway
    >>> frequencies, attention_factor = headway.rope_frequencies(8)
    >>> frequencies
    array([1.   , 0.1  , 0.01 , 0.001])
    >>> attention_factor
    1.0
    """
    head_dim = whole_number("rope_frequencies", "head_dim", head_dim)
    settings = settings_of("rope_frequencies", head_dim, base, dims, False, scaling)
    frequencies, attention_factor = _headway.rope_frequencies(head_dim, settings)
    return np.array(frequencies, np.float64), attention_factor


def _settings(
    operation: str, x: Any, base: float, dims: int | None, interleaved: bool, scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    shape = list(getattr(x, "shape", ()))
    return settings_of(operation, shape[-1] if len(shape) else 0, base, dims, interleaved, scaling)


def settings_of(
    operation: str,
    head_dim: int,
    base: float,
    dims: int | None,
    interleaved: bool,
    scaling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The fields of RopeConfig in C++."""
    settings: dict[str, Any] = {
        "base": _number(operation, "base", base),
        "interleaved": flag(operation, "interleaved", interleaved),
    }
    settings |= {"dims": None if dims is None else _whole(operation, "dims", dims), "scaling": "default"}
    if scaling is None:
        return settings
    if not isinstance(scaling, Mapping):
        raise TypeError(f"{operation}: scaling is a {type(scaling).__name__}, expected a dict")
    given = {key: value for key, value in scaling.items() if value is not None}
    for key in given:
        if key not in _KEYS and key not in _OTHERS:
            raise ValueError(f"{operation}: scaling has the key {key!r}, expected {', '.join([*_OTHERS, *_KEYS])}")
    kind = _kind(operation, given)
    settings["scaling"] = kind
    for key, name in _KEYS.items():
        if key in given:
            read = _whole if name in _WHOLE else _flag if name == "truncate" else _number
            settings[name] = read(operation, f"scaling[{key!r}]", given[key])
    if kind == "dynamic" and "original_length" not in settings and "max_position_embeddings" in given:
        settings["original_length"] = _whole(operation, "max_position_embeddings", given["max_position_embeddings"])
    _check_needed(operation, kind, settings)
    _add_others(operation, settings, head_dim, given)
    return settings


def _kind(operation: str, given: dict[str, Any]) -> str:
    kind: str = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ("default", *_NEEDED):
        raise ValueError(
            f"{operation}: scaling's rope_type is {shown(kind)}, expected 'default', {str([*_NEEDED])[1:-1]}"
        )
    return kind


def _check_needed(operation: str, kind: str, settings: dict[str, Any]) -> None:
    spelled = {name: key for key, name in _KEYS.items() if key != "length"}
    for name in _NEEDED.get(kind, ()):
        if name not in settings:
            why = ", which depends on the length of the text," if name == "length" else ""
            raise ValueError(f"{operation}: {kind} scaling{why} needs the key {spelled[name]!r}, found none")


def _add_others(operation: str, settings: dict[str, Any], head_dim: int, given: dict[str, Any]) -> None:
    """base and dims from the dict, where the call does not say them."""
    if "rope_theta" in given:
        theta = _number(operation, "scaling['rope_theta']", given["rope_theta"])
        if settings["base"] not in (10000.0, theta):
            raise ValueError(f"{operation}: base is {settings['base']}, scaling's rope_theta {theta}: expected one")
        settings["base"] = theta
    if "partial_rotary_factor" in given and settings["dims"] is None:
        share = _number(operation, "scaling['partial_rotary_factor']", given["partial_rotary_factor"])
        if not 0 <= share <= 1:
            raise ValueError(f"{operation}: scaling's partial_rotary_factor is {share}, expected 0 to 1")
        settings["dims"] = int(head_dim * share)


def _number(operation: str, name: str, value: Any) -> float:
    return real_number(operation, name, value)


def _whole(operation: str, name: str, value: Any) -> int:
    number = _number(operation, name, value)
    if not number.is_integer() or abs(number) >= 2**53:
        raise ValueError(f"{operation}: {name} is {shown(value)}, expected a whole number below 2^53")
    return int(number)


def _flag(operation: str, name: str, value: Any) -> bool:
    return flag(operation, name, value)
