"""What the script tests share: their arguments, commands that must succeed, and the three ways to end."""

import argparse
import pathlib
import subprocess
import sys

SKIPPED = 77


def arguments(*positional):
    """The paths and tools that CMake passes to every script test, after the script's own positional arguments."""
    parser = argparse.ArgumentParser()
    for name in positional:
        parser.add_argument(name)
    for name in ("cmake", "generator", "cxx"):
        parser.add_argument("--" + name, required=True)
    for name in ("source", "build", "scratch"):
        parser.add_argument("--" + name, required=True, type=pathlib.Path)
    return parser.parse_args()


def run(*command, **options):
    """The command's standard output; a command that fails ends the test with everything it printed."""
    command = [str(part) for part in command]
    result = subprocess.run(command, text=True, capture_output=True, **options)
    if result.returncode != 0:
        fail(f"exit status {result.returncode} from: {' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def project_version(source):
    header = (source / "include/headway/version.h").read_text()
    return header.split('HEADWAY_VERSION "')[1].split('"')[0]


def libdir(prefix):
    """The folder that holds the library, wherever this system puts it."""
    found = [path.parent for path in prefix.rglob("libheadway.*") if path.suffix in (".a", ".so", ".dylib")]
    if len(found) != 1:
        fail(f"expected one library under {prefix}, found {found}")
    return found[0]


def fail(text):
    print(text)
    sys.exit(1)


def skip(reason):
    print("skipped:", reason)
    sys.exit(SKIPPED)


def same_kernels(args):
    """The setting with which a build has the CPU kernels of args.build, and so takes their objects from ccache."""
    for line in (args.build / "CMakeCache.txt").read_text().splitlines():
        if line.startswith("HEADWAY_CPU_KERNELS:STRING="):
            return f"-DHEADWAY_CPU_KERNELS={line.split('=')[1]}"
    return fail("HEADWAY_CPU_KERNELS is not in the build's cache")
