"""Docstrings for mkdocstrings: those of the compiled functions, and all of them as Markdown.

The compiled functions' docstrings are read from python/src/docstrings.h: the site needs no build. A docstring here
is plain text: paragraphs, headings with an indented table below them, and examples.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import griffe

ROOT = pathlib.Path(__file__).parents[2]
CONSTANT = re.compile(r'inline constexpr const char\* (\w+) =\s*R"\((.*?)\)";', re.DOTALL)
NAMES = {"plan": "Plan", "mask": "Mask"}  # of a class, where its constant is named as a variable would be


def compiled_docstrings() -> dict[str, str]:
    """By the name of the function or class."""
    text = (ROOT / "python/src/docstrings.h").read_text()
    return {NAMES.get(name, name): value.strip() for name, value in CONSTANT.findall(text)}


def as_markdown(text: str) -> str:
    """Indented lines and examples in fences; a line above indented ones becomes a heading."""
    result: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.splitlines()
        if lines[0].lstrip().startswith(">>>"):
            result += ["```pycon", *lines, "```", ""]
            continue
        table: list[str] = []
        for line in [*lines, ""]:
            if line.startswith("    "):
                table.append(line[4:])
                continue
            if table:
                result += ["", "```text", *table, "```", ""]
                table = []
            following = lines[lines.index(line) + 1 :] if line else []
            is_heading = following and following[0].startswith("    ") and len(line) < 80
            result += [f"**{line.rstrip(':')}**"] if is_heading else [escaped(line)]
    return "\n".join(result)


def escaped(line: str) -> str:
    """A line that Markdown shows as it is; what stands between backticks is code there too."""
    parts = line.split("`")
    return "`".join(re.sub(r"([<*\[])", r"\\\1", part) if n % 2 == 0 else part for n, part in enumerate(parts))


class PlainText(griffe.Extension):
    """The extension that mkdocs.yml names."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Once the package is read: completes the compiled module, then rewrites every docstring."""
        compiled = pkg.members.get("_headway")
        if isinstance(compiled, griffe.Module):
            complete(compiled)
        rewrite(pkg)


def complete(module: griffe.Module) -> None:
    """Gives the stub's functions their docstrings; a function of overloads alone is shown as its last one."""
    for name, overloads in module.overloads.items():
        if name not in module.members:
            module.set_member(name, overloads[-1])
    for name, text in compiled_docstrings().items():
        if name in module.members:
            module.members[name].docstring = griffe.Docstring(text, parent=module.members[name])


def rewrite(item: griffe.Object | griffe.Alias) -> None:
    """The docstrings of an object and of everything in it."""
    if item.is_alias:
        return
    if item.docstring is not None:
        item.docstring.value = as_markdown(item.docstring.value)
    for member in list(item.members.values()):
        rewrite(member)
