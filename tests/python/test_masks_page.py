"""docs/masks.md: its drawings are the library's, and its patterns are what FlexAttention's mask_mod says."""

from __future__ import annotations

import doctest
import re

import numpy as np
import pytest

from headway import masks
from pages import ROOT

PAGE = (ROOT / "docs/masks.md").read_text()
KINDS, _, PATTERNS = PAGE.partition("\n## Ten patterns\n")
PATTERNS = PATTERNS.partition("\n## ")[0]
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", PATTERNS, re.DOTALL | re.MULTILINE))
TOKENS = 12


def test_the_drawings_are_the_library_s():
    examples = "\n".join(re.findall(r"^```pycon\n(.*?)```", KINDS, re.DOTALL | re.MULTILINE))
    test = doctest.DocTestParser().get_doctest(examples, {"masks": masks, "np": np}, "masks.md", None, 0)
    output: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=output.append)
    assert result.attempted >= 11 and result.failed == 0, "".join(output)


def test_every_kind_is_drawn():
    for name in masks.__all__:
        assert name == "Mask" or f"masks.{name}(" in KINDS or f"{name}(" in KINDS, name


def test_there_are_ten_patterns():
    assert len(SECTIONS) == 10


@pytest.mark.parametrize("title", SECTIONS)
def test_a_pattern_is_what_its_mask_mod_says_and_looks_as_drawn(title):
    torch = pytest.importorskip("torch")
    ours, theirs, drawing = re.findall(r"^```(?:python|text)\n(.*?)```", SECTIONS[title], re.DOTALL | re.MULTILINE)
    names = {"masks": masks, "np": np, "torch": torch, "n": TOKENS}
    exec(ours, names)
    exec(theirs, names)
    mask = names["mask"]
    i, j = torch.meshgrid(torch.arange(TOKENS), torch.arange(TOKENS), indexing="ij")
    expected = names["mask_mod"](0, 0, i, j)
    np.testing.assert_array_equal(mask.to_bool(TOKENS, TOKENS)[0, 0], expected.numpy())
    assert drawing == mask.draw(TOKENS, TOKENS) + "\n"
