"""The Python programs of the README and the guides print what is shown; the README's figures are those measured."""

import inspect
import re

import numpy as np
import pytest

import headway
from pages import ROOT, output_of, programs_of, skip_without_what_it_needs

PAGES = ("README.md", "docs/quickstart.md", "docs/view.md")
PROGRAMS = [(page, number) for page in PAGES for number in range(len(programs_of(page)))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "number"), PROGRAMS)
def test_a_program_prints_what_its_page_says(page, number, tmp_path, monkeypatch):
    program, expected = programs_of(page)[number]
    skip_without_what_it_needs(program)
    monkeypatch.chdir(tmp_path)
    assert output_of(program, names_before(program), page) == expected


def names_before(program):
    """The README's torch example begins with a model of the reader's."""
    if "replace_attention(model)" not in program:
        return {}
    import torch

    return {"model": torch.nn.Transformer(16, 2, 1, 1, 32, batch_first=True)}


def test_every_page_with_programs_is_run_by_a_test():
    elsewhere = {
        "docs/attention-from-scratch.md",
        "docs/distributed.md",
        "docs/masks.md",
        "docs/migrate-jax.md",
        "docs/migrate-torch.md",
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(page.relative_to(ROOT)) for page in pages if "```py" in page.read_text()}
    assert found == {*PAGES, *elsewhere, "docs/serving.md"}
    for page in elsewhere:  # each of their tests names its page
        tests = [path for path in (ROOT / "tests/python").glob("test_*.py") if path.name != "test_pages.py"]
        name = page.removeprefix("docs/")
        assert any(
            name in path.read_text() or ("migrate*.md" in path.read_text() and "torch" in name) for path in tests
        )


def test_the_programs_of_serving_run_one_after_the_other():
    names = {}
    for program, _ in programs_of("docs/serving.md"):
        exec(program, names)
    assert names["out"].shape == (2, 8, 1, 64)


def test_every_snippet_of_the_torch_guide_names_headway_torch():
    """Which is how its test knows them."""
    assert all("headway.torch" in program for program, _ in programs_of("docs/migrate-torch.md"))


def test_what_people_do_first_in_cpp_takes_thirty_lines_at_most():
    for name in ("masked_vectors", "train_layer", "decode", "packed_sequences", "safetensors"):
        lines = (ROOT / f"examples/{name}.cpp").read_text().splitlines()
        assert 10 <= len(lines) <= 30, name
        assert name in (ROOT / "examples/CMakeLists.txt").read_text()


def test_each_page_has_programs():
    assert all(len(programs_of(page)) >= 2 for page in PAGES)


def test_the_readme_s_benchmark_rows_are_those_of_the_full_tables():
    marked = re.compile(r"<!-- benchmark cpu: begin -->\n(.*?)<!-- benchmark cpu: end -->", re.DOTALL)
    [few] = marked.findall((ROOT / "README.md").read_text())
    [all_rows] = marked.findall((ROOT / "docs/benchmarks.md").read_text())
    rows = [line for line in few.splitlines() if re.match(r"\| \w", line)]
    assert len(rows) == 5
    for row in rows:
        group, name = re.match(r"\| (.*): (.*?) \|", row).groups()
        table = all_rows.split(f"### {group}; 2 threads\n")[1].split("###")[0]
        assert "|" + row.split("|", 2)[2] in table.split(f"| {name} ")[1].splitlines()[0]


def test_the_calls_in_the_readme_s_sentences_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    calls = [call.replace("mask=", "") for call in re.findall(r"`((?:headway\.|mask=)[^`]*\))`", text)]
    assert len(calls) == 4
    x = np.ones((1, 2, 3, 4), np.float32)
    names = {"headway": headway, "masks": headway.masks, "ids": [0, 0, 1], "words": ["a", "b", "c"]}
    for call in calls:
        if "torch" in call:
            torch = pytest.importorskip("torch", reason="torch is not installed")
            names["model"] = torch.nn.TransformerEncoderLayer(4, 2, 8)
        assert eval(call, names | {"query": x, "key": x, "value": x}) is not None, call
    assert {path.name for path in tmp_path.iterdir()} == {"attention.html", "trace.html"}


def test_the_readme_says_what_equal_bits_need_on_a_gpu():
    text = (ROOT / "README.md").read_text()
    assert "on a GPU independence of the batch needs `batch_invariant=True`, which is off by default" in text
    for function in (headway.attention, headway.attention_backward, headway.attention_varlen):
        assert inspect.signature(function).parameters["batch_invariant"].default is False


def test_the_readme_answers_what_why_and_how_on_its_first_screen():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 140
    assert lines.index("## Install") < 20 and any("pip install" in line for line in lines[:40])
