"""Checks a wheel as its user meets it: its size, what it holds, and an empty environment that it is installed into.

    wheel_test.py WHEEL [--python PYTHON] [--scratch FOLDER]

There the README's Python examples print what the README says, and the command reads and writes every kind of file and
serves its page. Nothing of that may need a compiler or the network; pip may get NumPy from where it gets packages.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile

from script import project_version

MEGABYTE = 1e6
LIMITS = {False: 15, True: 60}  # megabytes, without and with kernels for GPUs
README = pathlib.Path(__file__).parents[2] / "README.md"
EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
FIRST_RESULT = "import numpy as np, headway; x = np.ones((1, 1, 4, 8), np.float32); headway.attention(x, x, x)"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    megabytes = check_contents(args.wheel)
    with tempfile.TemporaryDirectory() as scratch:
        environment = Environment(pathlib.Path(scratch), args.python)
        begin = time.monotonic()
        environment.run(
            "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", args.wheel.resolve()
        )
        environment.run("python", "-c", FIRST_RESULT)
        took = time.monotonic() - begin
        examples = check_examples(environment)
        check_command(environment)
    print(f"{args.wheel.name}: {megabytes:.1f} MB, installed and first result in {took:.1f} s, {examples} examples")


def check_contents(wheel):
    """One library for all, and no more megabytes than promised."""
    names = zipfile.ZipFile(wheel).namelist()
    for pattern in (r"headway/lib/libheadway\.so\.[0-9.]+", r"headway/_headway\..*so", r"headway/bin/headway"):
        found = [name for name in names if re.fullmatch(pattern, name)]
        if len(found) != 1:
            sys.exit(f"expected one {pattern} in {wheel.name}, found {found}")
    megabytes = wheel.stat().st_size / MEGABYTE
    limit = LIMITS["cuda" in wheel.name]
    if megabytes > limit:
        sys.exit(f"{wheel.name} has {megabytes:.1f} MB, expected at most {limit}")
    return megabytes


class Environment:
    """An empty virtual environment, and a folder to work in."""

    def __init__(self, scratch, python):
        subprocess.run([python, "-m", "venv", scratch / "venv"], check=True)
        self.bin = scratch / "venv" / "bin"
        self.folder = scratch / "work"
        self.folder.mkdir()
        self.variables = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")
        }

    def run(self, program, *arguments):
        command = [str(part) for part in (self.bin / program, *arguments)]
        result = subprocess.run(command, cwd=self.folder, env=self.variables, text=True, capture_output=True)
        if result.returncode != 0:
            sys.exit(f"exit status {result.returncode} from: {' '.join(command)}\n{result.stdout}{result.stderr}")
        return result.stdout


def check_examples(environment):
    examples = EXAMPLE.findall(README.read_text())
    if not examples:
        sys.exit("expected Python examples in README.md")
    for program, expected in examples:
        printed = environment.run("python", "-c", program)
        if printed != expected:
            sys.exit(f"README.md does not show what this prints:\n{program}\nexpected\n{expected}\nfound\n{printed}")
    return len(examples)


def check_command(environment):
    """Every feature is there: each kind of file, the page as a file and from a server."""
    version = project_version(README.parent)
    for command in (("headway",), ("python", "-m", "headway")):
        printed = environment.run(*command, "--version")
        if version not in printed:
            sys.exit(f"expected version {version}, found {printed}")
    for kind in ("npy", "safetensors"):
        environment.run("headway", "random", "1,2,8,4", "-o", f"x.{kind}")
    environment.run("python", "-c", "import numpy as np; np.savez('x.npz', x=np.load('x.npy'))")
    for kind in ("npy", "npz", "safetensors"):
        environment.run("headway", "attend", *3 * [f"x.{kind}"], "-o", f"out_of_{kind}.npy")
    environment.run("headway", "view", "x.npy", "x.npy", "-o", "page.html")
    if "<html" not in (environment.folder / "page.html").read_text()[:2000]:
        sys.exit("expected a page in page.html")
    check_server(environment)


def check_server(environment):
    server = subprocess.Popen(
        [environment.bin / "headway", "view", "x.npy", "x.npy", "--serve"],
        cwd=environment.folder,
        env=environment.variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        line = server.stdout.readline()
        address = re.search(r"http://[^ \n]+", line)
        if not address:
            sys.exit(f"expected the address of the page, found {line}{server.stdout.read()}")
        if b"<html" not in urllib.request.urlopen(address.group(), timeout=20).read(2000):
            sys.exit(f"expected a page at {address.group()}")
    finally:
        server.terminate()
        server.wait()


main()
