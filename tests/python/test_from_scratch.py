"""docs/attention-from-scratch.md: its snippets print what it shows, and its prose names no number that they do not."""

import importlib.util
import re

import numpy as np
import pytest

import headway.functions  # noqa: F401  the package must be there, whatever the snippets import
from pages import ROOT, output_of, programs_of

PAGE = "docs/attention-from-scratch.md"
DOCUMENT = (ROOT / PAGE).read_text()
SNIPPETS = programs_of(PAGE)
FRAMEWORKS = {"torch": "import torch", "flax": "import headway.flax"}


def framework_of(program):
    return next((name for name, line in FRAMEWORKS.items() if line in program), None)


@pytest.fixture(autouse=True)
def as_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = np.get_printoptions()
    yield
    np.set_printoptions(**options)
    np.random.seed(None)


def test_the_snippets_are_one_session_that_prints_what_the_page_shows_and_draws_its_pictures(tmp_path):
    names = {}
    plain = [(program, expected) for program, expected in SNIPPETS if framework_of(program) is None]
    assert len(plain) > 30
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if has_matplotlib:
        import matplotlib

        matplotlib.use("Agg")
    for program, expected in plain:
        if has_matplotlib or "plot_" not in program:
            assert output_of(program, names, PAGE) == expected, program
    drawn = set(re.findall(r"\]\(([\w-]+\.png)\)", DOCUMENT)) - {"trace.png"}  # which a browser shows
    assert len(drawn) == 3 and all((ROOT / "docs" / name).exists() for name in drawn)
    assert not has_matplotlib or {path.name for path in tmp_path.glob("*.png")} == drawn


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_frameworks_snippets_print_what_the_page_shows(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    [(program, expected)] = [snippet for snippet in SNIPPETS if framework_of(snippet[0]) == framework]
    names = {}
    output_of(SNIPPETS[0][0], names, PAGE)  # which says how numbers are printed
    assert output_of(program, names, PAGE) == expected


def test_every_exercise_has_an_answer():
    exercises, answers = (
        re.findall(r"^\*\*\d\.\*\*", DOCUMENT, re.MULTILINE),
        DOCUMENT.count("<summary>Answer</summary>"),
    )
    assert len(exercises) == answers == DOCUMENT.count("</details>") >= 6


def test_every_number_in_the_prose_is_in_a_snippet_or_its_output():
    code = "\n".join(program + expected for program, expected in SNIPPETS)
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>|[Dd]ocument 00\d|00\d\b", " ", DOCUMENT, flags=re.DOTALL)
    prose = re.sub(r"float(32|64)|^\*\*\d\.\*\*", " ", prose, flags=re.MULTILINE)
    known = set(re.findall(r"\d+(?:\.\d+)?", code))
    numbers = re.findall(r"\d+(?:\.\d+)?", prose)
    assert numbers and not [number for number in numbers if number not in known]
