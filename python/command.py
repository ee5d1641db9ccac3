#!python
"""The `headway` command: becomes the program in the package, which starts faster than the package is imported."""

import importlib.util
import os
import sys

package = importlib.util.find_spec("headway")
if package is None or not package.submodule_search_locations:
    sys.exit("headway: the package headway is not installed for " + sys.executable)
program = os.path.join(package.submodule_search_locations[0], "bin", "headway")
os.execv(program, ["headway", *sys.argv[1:]])
