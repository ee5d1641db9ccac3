"""The scripts in examples/python and the snippets of docs/migrate-jax.md run as they stand."""

import importlib.util
import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrate-jax.md"


@pytest.mark.parametrize("name, needs", [("numpy", ()), ("jax", ("jax",)), ("flax", ("jax", "flax"))])
def test_an_example_runs_and_its_checks_hold(name, needs, capsys):
    for framework in needs:
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    runpy.run_path(str(ROOT / "examples" / "python" / f"{name}_attention.py"))
    assert capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, to NumPy
def test_the_page_s_snippets_run_one_after_the_other(monkeypatch):
    pytest.importorskip("flax", reason="flax is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # which a snippet sets too
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) >= 5
    names = {}
    for snippet in snippets:
        if "import keras" not in snippet or importlib.util.find_spec("keras"):
            exec(compile(snippet, str(PAGE), "exec"), names)
