"""What ./dev says in its last line, with programs in the place of the real ones that only succeed or fail.

dev_test.py python_missing|python_there|wrong_arguments ...
"""

import os
import shutil
import subprocess

from script import arguments, fail

PROGRAMS = {
    "cmake": """echo cmake version 3.25.1
mkdir -p build/clang
echo ' "command": "true -o file.o -c file.cpp",' >build/clang/compile_commands.json""",
    "ctest": "exit 0",
    "c++": "cat >/dev/null",
    "clang++": "exit 0",
    "ninja": "exit 0",
    "nproc": "echo 2",
}


WRONG = {  # arguments, and the last line
    "tset": "there is no command 'tset'",
    "clean all": "clean: there is no argument 'all'",
    "demo --fast": "demo: there is no argument '--fast'",
    "docs serve": "docs: there is no argument 'serve'",
    "build relaese": "build: expected release, debug, asan or tsan, found 'relaese'",
    "build release debug": "build: there is no argument 'debug'",
    "format --check src": "format: there is no argument 'src'",
    "test --fast": "test: expected --all or --sanitize, found '--fast'",
    "test --sanitize msan": "test: --sanitize takes asan, tsan or all, found 'msan'",
    "bench disk": "bench: expected cpu, python or gpu, found 'disk'",
    "fuzz --sanitize msan": "fuzz: --sanitize takes asan or tsan, found 'msan'",
    "wheel --gpu": "wheel: expected --cuda or --python, found '--gpu'",
    "wheel --python nothing": "wheel: 'nothing' is no Python 3.10 or later that runs here",
}


def main():
    args = arguments("step")
    folder = args.scratch / "dev" / args.step
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    shutil.copy(args.source / "dev", folder)
    shutil.copytree(args.source / "scripts", folder / "scripts")
    programs = dict(PROGRAMS, python3="exit 1" if args.step == "python_missing" else 'echo "python3 $*"')
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    if args.step == "wrong_arguments":
        check_wrong_arguments(folder)
        return
    result = test_run(folder)
    last = result.stdout.strip().splitlines()[-1]
    if "checking with clang++" not in result.stdout:
        fail(f"expected one clang in every test run, found\n{result.stdout}")
    if args.step == "python_missing":
        good = result.returncode != 0 and last == "failed: the Python tests, or they could not run"
        good = good and "python3-venv" in result.stdout and "python3-dev" in result.stdout
    else:
        good = result.returncode == 0 and last.startswith("everything passed (release) in ")
        good = good and "-m pytest" in result.stdout and "-m not slow" in result.stdout
    if not good:
        fail(f"{args.step}: exit status {result.returncode} and\n{result.stdout}")
    if args.step == "python_there":
        everything = test_run(folder, "--all")
        if everything.returncode != 0 or "-m pytest" not in everything.stdout or "not slow" in everything.stdout:
            fail(f"expected --all to run the slow tests too, found\n{everything.stdout}")


def check_wrong_arguments(folder):
    """They are refused before anything is installed, built or deleted."""
    (folder / "build").mkdir()
    for given, expected in WRONG.items():
        result = run_dev(folder, *given.split())
        if result.returncode == 0 or result.stdout.strip().splitlines()[-1] != expected:
            fail(f"./dev {given}: expected\n{expected}\nfound exit status {result.returncode} and\n{result.stdout}")
    if list((folder / "build").iterdir()):
        fail("expected that nothing is built")


def test_run(folder, *options):
    return run_dev(folder, "test", *options)


def run_dev(folder, *given):
    return subprocess.run(
        [folder / "dev", *given],
        env=dict(os.environ, PATH=f"{folder}/bin:/usr/bin:/bin", HEADWAY_INSTALL="never", NO_COLOR="1"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


main()
