"""Copies the examples of the README and of the pages below as they stand, compiles and runs them, and compares with
the output that is shown.

A ```cpp block is a program, and the ```text block after it what it prints; it is built against the installed library.
A ```cmake block is the end of a CMakeLists.txt, which must configure; a clone stands beside it where the text says so.
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


# Each page with its numbers of programs, commands and recipes: what a mistyped fence hides would otherwise be missed.
PAGES = {"README.md": (1, 0, 1), "docs/quickstart.md": (2, 2, 2), "docs/cli.md": (0, 12, 0)}


def main():
    args = arguments()
    for page, expected in PAGES.items():
        blocks = BLOCK.findall((args.source / page).read_text())
        found = check_page(args, page, blocks)
        if found != expected:
            fail(f"{page}: expected (programs, commands, CMake recipes) {expected}, found {found}")
        quickstart = (args.source / "examples/quickstart.cpp").read_text()
        if page == "docs/quickstart.md" and ("cpp", quickstart) not in blocks:
            fail(f"expected examples/quickstart.cpp as it stands in {page}")


def check_page(args, page, blocks):
    """Runs the page's programs and commands; returns how many there were of each."""
    folder = args.scratch / "pages" / page
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    programs = commands = recipes = 0
    for (kind, text), (next_kind, next_text) in zip(blocks, [*blocks[1:], ("", "")]):
        if kind == "cpp":
            if next_kind != "text":
                fail(f"{page}: expected a text block with its output after the program\n{text}")
            programs += 1
            compare(page, "the program\n" + text, next_text, output_of_program(args, folder, text))
        elif kind == "console":
            commands += check_session(args, page, folder, text)
        elif kind == "cmake":
            configure(args, folder / "recipe", text, "-DHEADWAY_CUDA=OFF")
            recipes += 1
    return programs, commands, recipes


def configure(args, folder, recipe, *settings):
    """Configures a project of one program that follows the recipe; returns its build folder."""
    folder.mkdir(exist_ok=True)
    if not (folder / "headway").exists():
        (folder / "headway").symlink_to(args.source)
    if not (folder / "main.cpp").exists():
        (folder / "main.cpp").write_text("int main() {}\n")
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(readme LANGUAGES CXX)\nadd_executable(program main.cpp)\n"
        + recipe
    )
    where = ("-S", folder, "-B", folder / "build", "-G", args.generator, f"-DCMAKE_CXX_COMPILER={args.cxx}")
    prefix = args.scratch / "static/prefix"
    run(args.cmake, *where, f"-DCMAKE_PREFIX_PATH={prefix}", *settings)
    return folder / "build"


def output_of_program(args, folder, text):
    project = folder / "program"
    project.mkdir(exist_ok=True)
    (project / "main.cpp").write_text(text)
    recipe = "find_package(headway REQUIRED)\ntarget_link_libraries(program PRIVATE headway::headway)\n"
    build = configure(args, project, recipe, "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror")
    run(args.cmake, "--build", build)
    return run(build / "program", cwd=project)


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
