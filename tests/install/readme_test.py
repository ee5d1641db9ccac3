"""Copies the examples of the README and of the pages below as they stand, compiles and runs them, and compares with
the output that is shown.

A ```cpp block is a program, and the ```text block after it what it prints; it is built against the installed library.
In a ```console block a line `$ headway ...` is run with the installed command, in one folder a page. A line `...`
stands for lines left out. Numbers may differ in the fourth digit, since the last bits of exp() differ between C
libraries. What depends on the machine is not compared: times, and which engine and kernel it has for a call.
"""

import difflib
import os
import re
import shutil
import subprocess

from printed import lines_of, matches
from script import arguments, fail, run

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# Each page with its numbers of programs and of commands: what a mistyped fence hides would otherwise not be missed.
PAGES = {"README.md": (1, 0), "docs/quickstart.md": (2, 2), "docs/cli.md": (0, 11)}


def main():
    args = arguments()
    for page, expected in PAGES.items():
        blocks = BLOCK.findall((args.source / page).read_text())
        found = check_page(args, page, blocks)
        if found != expected:
            fail(f"{page}: expected {expected[0]} programs and {expected[1]} commands, found {found[0]} and {found[1]}")
        quickstart = (args.source / "examples/quickstart.cpp").read_text()
        if page == "docs/quickstart.md" and ("cpp", quickstart) not in blocks:
            fail(f"expected examples/quickstart.cpp as it stands in {page}")


def check_page(args, page, blocks):
    """Runs the page's programs and commands; returns how many there were of each."""
    folder = args.scratch / "pages" / page
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    programs = commands = 0
    for (kind, text), (next_kind, next_text) in zip(blocks, [*blocks[1:], ("", "")]):
        if kind == "cpp":
            if next_kind != "text":
                fail(f"{page}: expected a text block with its output after the program\n{text}")
            programs += 1
            compare(page, "the program\n" + text, next_text, output_of_program(args, folder, text))
        elif kind == "console":
            commands += check_session(args, page, folder, text)
    return programs, commands


def output_of_program(args, folder, text):
    prefix = args.scratch / "static/prefix"
    source = folder / "CMakeLists.txt"
    (folder / "main.cpp").write_text(text)
    source.write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(readme LANGUAGES CXX)\n"
        "find_package(headway REQUIRED)\nadd_executable(readme main.cpp)\n"
        "target_link_libraries(readme PRIVATE headway::headway)\n"
    )
    build = folder / "build"
    run(
        args.cmake,
        "-S",
        folder,
        "-B",
        build,
        "-G",
        args.generator,
        f"-DCMAKE_CXX_COMPILER={args.cxx}",
        f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror",
    )
    run(args.cmake, "--build", build)
    return run(build / "readme", cwd=folder)


def check_session(args, page, folder, text):
    """Runs the headway commands of a console block; returns how many there were."""
    commands = [part for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:] if part.startswith("headway ")]
    for part in commands:
        command, _, expected = part.partition("\n")
        if (args.scratch / "static/prefix/bin/headway").exists():
            compare(page, command, expected, output_of_command(args, folder, command))
        else:
            print("not run, because this build has no headway command:", command)
    return len(commands)


def output_of_command(args, folder, command):
    """What a terminal would show; a command may fail, if the page shows its error."""
    path = os.pathsep.join([str(args.scratch / "static/prefix/bin"), os.environ.get("PATH", "")])
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=dict(os.environ, PATH=path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ).stdout


def compare(page, what, expected, found):
    wanted, real = lines_of(expected), lines_of(found)
    if not matches(wanted, real):
        fail(
            f"{page} does not show what this prints: {what}\n"
            + "\n".join(difflib.unified_diff(wanted, real, page, "printed", lineterm=""))
        )


main()
