"""What `cmake` says and decides before anything is built, and Headway as a part of another project.

configure_test.py plain|hidden|missing_parts|elsewhere|wrong_setting|subdirectory ...
"""

import json
import os
import shutil
import subprocess

from script import arguments, fail, run, same_kernels, skip

STEPS = {}


def step(function):
    STEPS[function.__name__] = function
    return function


def main():
    args = arguments("step")
    folder = args.scratch / args.step
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    STEPS[args.step](args, folder)


@step
def plain(args, folder):
    """`cmake -B build` on a machine with a compiler, make and nvcc, but without a GPU, Ninja and GoogleTest."""
    environment = dict(os.environ)
    environment.pop("CMAKE_GENERATOR", None)
    said = run(
        args.cmake,
        *("-S", args.source, "-B", folder),
        f"-DCMAKE_CXX_COMPILER={args.cxx}",
        "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON",
        f"-DHEADWAY_NVIDIA_SMI={shutil.which('false')}",
        env=environment,
    )
    if "CMAKE_GENERATOR:INTERNAL=Unix Makefiles" not in (folder / "CMakeCache.txt").read_text():
        fail("expected a build by make")
    if "CUDA engine: OFF (there is no NVIDIA GPU here" not in said:
        fail("expected no CUDA engine on a machine without a GPU, found\n" + said)
    commands = json.loads((folder / "compile_commands.json").read_text())
    for command in commands:
        if "-Werror" in command["command"] or command["file"].startswith(f"{args.source}/tests/"):
            fail("a plain build needs no tests, and no warning ends it: " + command["command"])
    if not any("-O3" in command["command"] for command in commands):
        fail("expected an optimised build")


@step
def hidden(args, folder):
    """A shared library shows no more where tests are built that reach inside of it."""
    settings = ("-DBUILD_SHARED_LIBS=ON", "-DHEADWAY_BUILD_TESTS=ON", "-DHEADWAY_CUDA=OFF")
    run(args.cmake, "-S", args.source, "-B", folder, f"-DCMAKE_CXX_COMPILER={args.cxx}", *settings)
    commands = json.loads((folder / "compile_commands.json").read_text())
    library = [command for command in commands if "/headway.dir/" in command["command"]]
    if not library or not all("-fvisibility=hidden" in command["command"] for command in library):
        fail("expected every file of the library to be compiled with -fvisibility=hidden")


@step
def missing_parts(args, folder):
    """A build that lacks packages says so in its last lines."""
    packages = ("ZLIB", "nlohmann_json", "CLI11", "PkgConfig")
    disabled = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in packages]
    said = run(args.cmake, "-S", args.source, "-B", folder, f"-DCMAKE_CXX_COMPILER={args.cxx}", *disabled)
    end = said.split("Headway 0.")[1]
    for part in ("zlib1g-dev", "nlohmann-json3-dev", "libcli11-dev", "libcpp-httplib-dev", "-DHEADWAY_FETCH=ON"):
        if part not in end:
            fail(f"expected a line about {part} at the end, found\n{said}")


@step
def elsewhere(args, folder):
    """Another system is refused by its name, before its compiler is tried."""
    for system in ("Darwin", "Windows"):
        command = [args.cmake, "-S", args.source, "-B", folder / system, f"-DCMAKE_SYSTEM_NAME={system}"]
        result = subprocess.run([str(part) for part in command], text=True, capture_output=True)
        words = " ".join(result.stderr.split())
        if (
            result.returncode == 0
            or f"Headway runs on Linux only (x86-64 and 64-bit ARM); this build is for {system}" not in words
        ):
            fail(f"expected one clear refusal of {system}, found\n{result.stdout}{result.stderr}")


@step
def wrong_setting(args, folder):
    """A value that a setting does not have is refused, and not taken for another one."""
    for setting, value, expected in (
        ("HEADWAY_CPU_KERNELS", "native", "expected ALL, RUNNABLE or NATIVE"),
        ("HEADWAY_CUDA_LIBRARY", "/usr/lib/libcuda.so", "expected ON or OFF"),
    ):
        command = [args.cmake, "-S", args.source, "-B", folder / setting, f"-D{setting}={value}"]
        result = subprocess.run([str(part) for part in command], text=True, capture_output=True)
        if result.returncode == 0 or f"{setting} is '{value}', {expected}" not in " ".join(result.stderr.split()):
            fail(f"expected {setting}={value} to be refused, found\n{result.stdout}{result.stderr}")


@step
def subdirectory(args, folder):
    """A project that vendors zlib adds Headway, builds, and installs itself alone."""
    if not (args.build / "CMakeCache.txt").read_text().count("HEADWAY_IO_NPZ:INTERNAL=ON"):
        skip("there is no zlib here")
    build, prefix = folder / "build", folder / "prefix"
    run(
        args.cmake,
        *("-S", args.source / "tests/install/parent", "-B", build, "-G", args.generator),
        f"-DCMAKE_CXX_COMPILER={args.cxx}",
        "-DCMAKE_BUILD_TYPE=Release",  # with the same commands as everywhere: ccache has its objects
        "-DHEADWAY_WARNINGS_AS_ERRORS=ON",
        same_kernels(args),
        f"-DHEADWAY_SOURCE={args.source}",
    )
    run(args.cmake, "--build", build, "--parallel", "2")
    run(build / "parent")
    run(args.cmake, "--install", build, "--prefix", prefix)
    installed = [str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()]
    if installed != ["bin/parent"]:
        fail(f"expected the parent's own program to be installed, found {installed}")
    # Whoever asks for Headway's install rules gets them, here too; and the system's zlib does as well.
    run(args.cmake, build, "-DHEADWAY_ENABLE_INSTALL=ON")
    run(args.cmake, build, "-DPARENT_HAS_ZLIB=OFF")


main()
