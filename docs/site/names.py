"""The public names of the Python package, read from its sources: the site is built without importing it."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
# By the page of the reference that has them. A module that a version does not have is left out.
MODULES = {
    "python": ("headway", "headway.masks", "headway.convert", "headway.distributed"),
    "torch": ("headway.torch", "headway.torch.distributed"),
    "jax": ("headway.jax", "headway.flax", "headway.flax.nnx", "headway.keras"),
}


def public_names(page: str) -> list[str]:
    """headway.attention, ..., of all modules of one page."""
    return [f"{module}.{name}" for module in MODULES[page] for name in names_of(module) if name != "__version__"]


def names_of(module: str) -> list[str]:
    """What a module's __all__ lists."""
    base = ROOT / "python" / module.replace(".", "/")
    source = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)
    if source is None:
        return []
    [listed] = re.findall(r"^__all__ = \[(.*?)\]", source.read_text(), re.DOTALL | re.MULTILINE)
    return re.findall(r'"(\w+)"', listed)


def with_every_name(page: str, markdown: str) -> str:
    """The page, with what it does not list yet at its end."""
    listed = re.findall(r"^::: (\S+)", markdown, re.MULTILINE)
    missing = [name for name in public_names(page) if not any(f"{name}.".startswith(f"{one}.") for one in listed)]
    return markdown + ("\n## More\n\n" + "".join(f"::: {name}\n" for name in missing) if missing else "")
