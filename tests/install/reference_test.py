"""The examples of the C++ reference print what the comments beside them say."""

import difflib
import re
import subprocess

from printed import lines_of, matches
from script import SKIPPED, arguments, fail, skip

# A statement that prints, and the comment that ends its line or stands in the lines below it.
PRINTS = re.compile(r"std::cout[^;]*;(?: \})?(?: *// (.*)|((?:\n *// .*)+))?$", re.MULTILINE)


def main():
    args = arguments()
    result = subprocess.run([args.build / "examples/example_reference"], text=True, capture_output=True)
    if result.returncode == SKIPPED:
        skip(result.stdout.splitlines()[-1])
    if result.returncode != 0:
        fail(f"exit status {result.returncode}\n{result.stdout}{result.stderr}")
    folder = args.source / "examples/reference"
    headers = re.findall(r"(\w+)_examples\(\);", (folder / "main.cpp").read_text())
    wanted = lines_of("\n".join(line for header in headers for line in comments(folder / f"{header}.cpp")))
    real = lines_of(result.stdout)
    if len(wanted) < 60 or not matches(wanted, real):
        fail("\n".join(difflib.unified_diff(wanted, real, "the comments", "printed", lineterm="")))


def comments(path):
    for one, several in PRINTS.findall(path.read_text()):
        yield from [one] if one else re.findall(r"// (.*)", several)


main()
