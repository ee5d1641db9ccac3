"""docs/attention-from-scratch.md: its snippets print what it shows, and its prose names no number that they do not."""

import contextlib
import io
import pathlib
import re

import numpy as np
import pytest

import headway.functions  # noqa: F401  the package must be there, whatever the snippets import

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs/attention-from-scratch.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", DOCUMENT, re.DOTALL)
FRAMEWORKS = {"torch": "import torch", "flax": "import headway.flax"}


def framework_of(program):
    return next((name for name, line in FRAMEWORKS.items() if line in program), None)


def output_of(program, names):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/attention-from-scratch.md", "exec"), names)
    return printed.getvalue()


@pytest.fixture(autouse=True)
def numpy_as_found():
    options = np.get_printoptions()
    yield
    np.set_printoptions(**options)
    np.random.seed(None)


def test_the_snippets_are_one_session_that_prints_what_the_page_shows():
    names = {}
    plain = [(program, expected) for program, expected in SNIPPETS if framework_of(program) is None]
    assert len(plain) > 20
    for program, expected in plain:
        assert output_of(program, names) == expected, program


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_frameworks_snippets_print_what_the_page_shows(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    [(program, expected)] = [snippet for snippet in SNIPPETS if framework_of(snippet[0]) == framework]
    names = {}
    output_of(SNIPPETS[0][0], names)  # which says how numbers are printed
    assert output_of(program, names) == expected


def test_every_number_in_the_prose_is_in_a_snippet_or_its_output():
    code = "\n".join(program + expected for program, expected in SNIPPETS)
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|[Dd]ocument 00\d|00\d\b", " ", DOCUMENT, flags=re.DOTALL)
    prose = re.sub(r"float(32|64)", " ", prose)
    known = set(re.findall(r"\d+(?:\.\d+)?", code))
    numbers = re.findall(r"\d+(?:\.\d+)?", prose)
    assert numbers and not [number for number in numbers if number not in known]
