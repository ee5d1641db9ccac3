"""The extension calls nothing of Python that is missing from the stable ABI, in which it is built from 3.12 on."""

import pathlib
import re

import abi3info

SOURCES = pathlib.Path(__file__).parents[2] / "python" / "src"


def test_every_function_of_python_is_in_the_stable_abi_of_3_12():
    stable = {
        symbol.name for symbol, entry in abi3info.FUNCTIONS.items() if (entry.added.major, entry.added.minor) <= (3, 12)
    }
    macros = {
        "PyBytes_Check",
        "PyObject_TypeCheck",
        "PyTuple_Check",
        "PyUnicode_Check",
    }  # over functions that are in it
    used = {}
    for path in sorted(SOURCES.glob("*.[ch]*")):
        for name in re.findall(r"\b(Py[A-Z]\w*_\w+)\(", path.read_text()):
            used.setdefault(name, path.name)
    assert len(used) > 20
    assert {name: where for name, where in used.items() if name not in stable | macros} == {}
