"""The site: every public function of C++ and Python is in it with an example, and it builds without a warning."""

import contextlib
import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

import headway
from pages import ROOT

sys.path.insert(0, str(ROOT / "docs/site"))
import headers

HEADERS = headers.headers(ROOT)
NOT_CALLED_BY_USERS = re.compile(r"begin|end|(throw|require)_\w+")  # but by range-for, and by inline functions


def public_names(header):
    """(functions, members) that a header declares, found by counting braces: not as the site does it."""
    text = (ROOT / f"include/headway/{header}.h").read_text()
    inner = re.findall(r"^namespace (?!headway)\w+ \{$|^\}  // namespace (?!headway$)\w+$", text, re.MULTILINE)
    for border in inner:  # what lies in headway::masks counts as the header's own
        text = text.replace(border, "")
    text = re.sub(r"//.*|^#define.*(?:\n.*\\$)*|^#.*", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n private:\n.*?\n\};", "\n};", text, flags=re.DOTALL)
    text = re.split(r"namespace headway(?:::distributed)? \{", text, maxsplit=1)[1]
    depth, parentheses, kinds, statement = 1, 0, [], ""
    functions, members = set(), set()
    for letter in text:
        if letter in ";{}" and parentheses == 0:
            names = re.findall(r"(?<![\w.:])([a-z_]\w*)\(", flattened(statement))
            names = [name for name in names if name not in ("requires", "decltype", "operator")]
            declares = names and not re.search(r"\boperator|^\s*using ", statement)
            if declares and depth == 1:
                functions.add(names[0])
            elif declares and depth == 2 and kinds[-1] == "type":
                members.add(names[0])
            if letter == "{":
                kinds.append("type" if re.search(r"\b(struct|class)\b", statement) else "body")
                depth += 1
            elif letter == "}":
                depth -= 1
                if depth == 0:
                    break
                kinds.pop()
            statement = ""
            continue
        parentheses += {"(": 1, ")": -1}.get(letter, 0)
        statement += letter
    types = set(re.findall(r"(?:struct|class) (\w+)", text))
    return functions - types, {name for name in members - types if not NOT_CALLED_BY_USERS.fullmatch(name)}


def flattened(statement):
    """Without what stands inside of parentheses, and without an initializer list."""
    while re.search(r"\([^()]+\)", statement):
        statement = re.sub(r"\([^()]+\)", "()", statement)
    return re.split(r"\)\s*:", statement)[0]


@pytest.mark.parametrize("header", HEADERS)
def test_every_public_function_of_a_header_is_on_its_page_with_an_example(header):
    page = headers.page_of(ROOT, header)
    headings = " ".join(re.findall(r"^## (.*)$", page, re.MULTILINE))
    examples = "\n".join(re.findall(r"Example:\n\n```cpp\n(.*?)```", page, re.DOTALL))
    functions, members = public_names(header)
    for name in functions:
        assert re.search(rf"\b{name}\b", headings), f"{name} has no section"
        assert re.search(rf"\b{name}\(", examples), f"{name} has no example"
    for name in members:
        assert re.search(rf"(\.|::){name}\b", examples), f"the member {name} has no example"


def test_the_functions_of_mpi_h_have_an_example_on_the_page_about_several_processes():
    """Its reference is that page: examples/reference is built without MPI."""
    page = (ROOT / "docs/distributed.md").read_text()
    [example] = [text for text in re.findall(r"```cpp\n(.*?)```", page, re.DOTALL) if "<headway/mpi.h>" in text]
    text = (ROOT / "include/headway/mpi.h").read_text()
    names = [*re.findall(r"^class (\w+)", text, re.MULTILINE), *re.findall(r"^void (\w+)\(", text, re.MULTILINE)]
    assert len(names) == 3
    assert [name for name in names if f"distributed::{name}" not in example] == []


def test_the_names_that_are_looked_for_are_those_of_the_headers():
    assert public_names("threads")[0] == {"get_threads", "set_threads", "set_executor", "release_memory"}
    assert {"attention", "explain", "attention_varlen_backward"} < public_names("attention")[0]
    assert {"forward", "infer", "backward", "load", "parameters"} < public_names("layer")[1]
    assert {"transpose", "expand", "as", "clone", "of"} < public_names("tensor")[1]
    assert sum(len(public_names(header)[0]) for header in HEADERS) >= 35


def python_names():
    modules = [headway]
    for name in ("masks", "convert", "distributed", "jax", "flax", "flax.nnx", "torch", "torch.distributed", "keras"):
        with contextlib.suppress(ImportError):
            modules.append(importlib.import_module(f"headway.{name}"))
    return [f"{module.__name__}.{name}" for module in modules for name in module.__all__ if name != "__version__"]


def test_the_site_builds_without_a_warning_and_has_every_public_name_of_python_with_an_example(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = dict(os.environ, NO_MKDOCS_2_WARNING="1")
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stderr

    html = "".join((tmp_path / f"reference/{page}.html").read_text() for page in ("python", "torch", "jax"))
    parts = re.split(r'<h\d id="(headway[\w.]*)"', html)
    found = dict(zip(parts[1::2], parts[2::2]))
    for name in python_names():
        assert name in found, f"{name} is not in the site"
        assert '<span class="gp">&gt;&gt;&gt;' in found[name], f"{name} has no example in the site"
    for path in tmp_path.rglob("*.html"):
        elsewhere = re.findall(r'(?:src|<link[^>]*href)="(https?://[^"]*)', path.read_text())
        assert not elsewhere, f"{path.name} would load {elsewhere}"


def test_the_site_leaves_no_page_out():
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    made = {"index.md", "contributing.md", "changelog.md", *(f"reference/cpp/{name}.md" for name in HEADERS)}
    assert listed == pages | made, pathlib.Path("mkdocs.yml")
