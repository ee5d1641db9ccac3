"""Frameworks that parts of this package need, and the lowest versions with which they work."""

import importlib
import re

LOWEST = {"torch": "2.5", "jax": "0.6", "flax": "0.10"}  # as in pyproject.toml
NAMES = {"torch": "PyTorch", "jax": "JAX", "flax": "Flax"}


def need(user: str, *packages: str) -> None:
    """Raises an ImportError that says what to install, if a package is missing or too old for `user`."""
    for package in packages:
        lowest = LOWEST[package]
        needed = f"{user} needs {NAMES[package]} {lowest} or later"
        install = f"pip install '{package}>={lowest}'"
        try:
            version = importlib.import_module(package).__version__
        except ImportError as error:
            raise ImportError(
                f"{needed}, which cannot be imported here ({error}): {install}", name=error.name
            ) from error
        if _numbers(version) < _numbers(lowest):
            raise ImportError(f"{needed}, found {version}: {install}", name=package)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
