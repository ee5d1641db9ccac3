"""What ./dev says in its last line, with programs in the place of the real ones that only succeed or fail.

dev_test.py python_missing|python_there ...
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


def test_run(folder, *options):
    return subprocess.run(
        [folder / "dev", "test", *options],
        env=dict(os.environ, PATH=f"{folder}/bin:/usr/bin:/bin", HEADWAY_INSTALL="never", NO_COLOR="1"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


main()
