"""The extension calls nothing of Python that is missing from the stable ABI, in which it is built from 3.12 on."""

import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import abi3info
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "python" / "src"
CALLS_PYTHON = re.compile(r"\bPy[A-Z]\w*_")


def test_every_function_of_python_is_in_the_stable_abi_of_3_12():
    stable = {
        symbol.name for symbol, entry in abi3info.FUNCTIONS.items() if (entry.added.major, entry.added.minor) <= (3, 12)
    }
    macros = {
        "PyBytes_Check",
        "PyDict_Check",
        "PyFloat_CheckExact",
        "PyLong_CheckExact",
        "PyObject_TypeCheck",
        "PyTuple_Check",
        "PyUnicode_Check",
    }  # over functions and types that are in it
    used = {}
    for path in sorted(SOURCES.glob("*.[ch]*")):
        for name in re.findall(r"\b(Py[A-Z]\w*_\w+)\(", path.read_text()):
            used.setdefault(name, path.name)
    assert len(used) > 20
    assert {name: where for name, where in used.items() if name not in stable | macros} == {}


@pytest.mark.slow  # most of what it could find is a function that the test above finds
def test_every_source_that_calls_python_compiles_for_the_stable_abi_of_3_12(tmp_path):
    """As nanobind's STABLE_ABI has it for Python 3.12, with the headers of the Python that is here."""
    nanobind = pytest.importorskip("nanobind", reason="nanobind is not installed")
    compiler = os.environ.get("CXX") or shutil.which("c++")
    headers = pathlib.Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").exists():
        pytest.skip("there is no C++ compiler, or no Python.h")
    folders = [ROOT / "include", ROOT / "src", SOURCES, nanobind.include_dir(), headers]
    command = [
        compiler,
        "-std=c++20",
        "-fsyntax-only",
        "-DPy_LIMITED_API=0x030C0000",
        *(f"-I{path}" for path in folders),
    ]
    command += ["-include", str(pathlib.Path(__file__).with_name("limited_api.h"))]

    def errors_in(source):
        return subprocess.run([*command, str(source)], capture_output=True, text=True).stderr

    (tmp_path / "wrong.cpp").write_text("void f(PyObject* x) { PyObject_CallMethodNoArgs(x, x); }\n")
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if CALLS_PYTHON.search(path.read_text())]
    assert len(sources) > 5
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong, *others = pool.map(errors_in, [tmp_path / "wrong.cpp", *sources])
    assert "PyObject_CallMethodNoArgs" in wrong
    assert "error: " not in "".join(others), "".join(others)
