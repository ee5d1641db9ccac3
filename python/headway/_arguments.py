"""Arguments as the functions need them; what cannot be read is an error that begins with the function's name."""

from __future__ import annotations

import operator
import os
from typing import Any

import numpy as np

_LONGEST = 100


def shown(value: Any) -> str:
    """The value as Python writes it, on one line, shortened where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def whole_number(operation: str, name: str, value: Any, expected: str = "an integer", bits: int | None = 63) -> int:
    """TypeError unless it is one; ValueError where it takes more bits."""
    try:
        number = int(operator.index(value))
    except TypeError:
        raise TypeError(f"{operation}: {name} is {shown(value)}, expected {expected}") from None
    if bits is not None and not -(2**63) <= number < 2**bits:
        raise ValueError(f"{operation}: {name} is {shown(number)}, expected a number below 2^{bits}")
    return number


def real_number(operation: str, name: str, value: Any) -> float:
    """TypeError unless it is one number; texts that spell one are not."""
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"{operation}: {name} is {shown(value)}, expected a number")


def flag(operation: str, name: str, value: Any) -> bool:
    """What counts as true or false in Python; an array of several elements does not."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{operation}: {name} is {shown(value)}, expected True or False") from None


def path_bytes(operation: str, path: Any) -> bytes:
    """A path as the compiled part takes it."""
    try:
        return os.fsencode(path)
    except TypeError:
        raise TypeError(f"{operation}: path is {shown(path)}, expected a str or a pathlib.Path") from None


def as_numpy(operation: str, name: str, value: Any) -> Any:
    """np.asarray, which takes nested lists too, but those of unequal lengths."""
    if value is None:
        raise TypeError(f"{operation}: {name} is None, expected an array")
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(f"{operation}: {name} is {shown(value)}, expected rows of equal length") from None
    except Exception as error:  # whatever the array's own conversion raises
        raise TypeError(f"{operation}: {name} cannot be read as an array: {error}") from None
