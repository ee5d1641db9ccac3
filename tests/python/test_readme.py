"""The README's Python examples print what the README says."""

import contextlib
import io
import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize(("program", "expected"), EXAMPLES)
def test_a_readme_example_prints_what_the_readme_says(program, expected):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(README), "exec"), {})
    assert printed.getvalue() == expected


def test_the_readme_has_a_python_example():
    assert EXAMPLES
