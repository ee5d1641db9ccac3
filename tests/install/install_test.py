"""Installs the library into a scratch prefix, and builds and runs outside/ against what was installed.

    install_test.py install|find_package|pkg_config|older_language static|shared ...

The static library is this build's own, installed to another prefix than it was configured for. The shared one is built
here, with folders that are not the usual ones, so that nothing can depend on those, and with tests to be built, which
must not change what it shows.
"""

import os
import shutil
import subprocess

from script import arguments, fail, libdir, project_version, run, same_kernels, skip

EXPECTED = """\
mean 2
explains attention on reference
layer gives (1, 3, 4)
version {version}
"""
UNUSUAL_LIBDIR = "libraries/here"


def main():
    args = arguments("step", "library")
    prefix = args.scratch / args.library / "prefix"
    steps = (install, find_package, pkg_config, older_language)
    {step.__name__: step for step in steps}[args.step](args, prefix)


def install(args, prefix):
    shutil.rmtree(prefix.parent, ignore_errors=True)
    build = args.build
    if args.library == "shared":
        build = prefix.parent / "library"
        run(
            args.cmake,
            "-S",
            args.source,
            "-B",
            build,
            "-G",
            args.generator,
            f"-DCMAKE_CXX_COMPILER={args.cxx}",
            "-DBUILD_SHARED_LIBS=ON",
            "-DCMAKE_BUILD_TYPE=Release",  # with the same commands as the static one: ccache has its objects
            "-DHEADWAY_WARNINGS_AS_ERRORS=ON",
            "-DHEADWAY_BUILD_CLI=OFF",
            "-DHEADWAY_BUILD_TESTS=ON",
            "-DHEADWAY_CUDA=OFF",
            same_kernels(args),
            f"-DCMAKE_INSTALL_LIBDIR={UNUSUAL_LIBDIR}",
        )
        targets = run(args.cmake, "--build", build, "--target", "help")
        mpi = ["headway_mpi"] if "headway_mpi" in targets else []
        run(args.cmake, "--build", build, "--parallel", "2", "--target", "headway", *mpi)
    run(args.cmake, "--install", build, "--prefix", prefix)
    check_headers(args, prefix)
    check_visibility(prefix)
    if args.library == "shared":
        check_symbols(prefix)
        check_soname(args, prefix)


def check_visibility(prefix):
    """What a public header declares leaves a shared library."""
    for header in sorted((prefix / "include/headway").glob("*.h")):
        text = header.read_text()
        declares = "namespace headway {" in text and header.name != "version.h"
        if declares and "#pragma GCC visibility push(default)" not in text:
            fail(f"{header.name} declares names that a shared library would hide: it has no visibility pragma")


def check_symbols(prefix):
    """The library shows what the public headers declare, and none of what lies behind it."""
    tool = shutil.which("nm")
    if not tool:
        skip("there is no nm here")
    shown = run(tool, "--dynamic", "--defined-only", "--demangle", libdir(prefix) / "libheadway.so").splitlines()
    names = [line.split(" ", 2)[2] for line in shown]
    if not any(name.startswith("headway::attention(") for name in names):
        fail("the shared library does not show headway::attention")
    inner = [name for name in names if "headway::cpu::" in name or "headway::reference::" in name]
    if inner:
        fail(f"the shared library shows {len(inner)} names of its engines, {inner[0]} among them")


def check_soname(args, prefix):
    """The name that a loader goes by changes with every version that may break a program."""
    tool = shutil.which("readelf")
    if not tool:
        skip("there is no readelf here")
    major, minor, _ = project_version(args.source).split(".")
    expected = f"libheadway.so.0.{minor}" if major == "0" else f"libheadway.so.{major}"
    if f"[{expected}]" not in run(tool, "--dynamic", libdir(prefix) / "libheadway.so"):
        fail(f"expected the soname {expected}")


def check_headers(args, prefix):
    """Everything public is installed, and nothing else."""
    public = {path.name for path in (args.source / "include/headway").glob("*.h")}
    folder = prefix / "include"
    installed = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if installed != {f"headway/{name}" for name in public}:
        fail(f"expected the headers {sorted(public)}, found {sorted(installed)}")


def find_package(args, prefix):
    build = prefix.parent / "with_find_package"
    shutil.rmtree(build, ignore_errors=True)
    # CMake looks into the usual folders of a prefix; where the library lies elsewhere, its user says so.
    where = f"CMAKE_PREFIX_PATH={prefix}" if args.library == "static" else f"headway_DIR={libdir(prefix)}/cmake/headway"
    run(
        args.cmake,
        "-S",
        args.source / "tests/install/outside",
        "-B",
        build,
        "-G",
        args.generator,
        f"-DCMAKE_CXX_COMPILER={args.cxx}",
        f"-D{where}",
    )
    run(args.cmake, "--build", build)
    check_output(args, run(build / "outside"))
    features = (build / "features.txt").read_text()
    in_pc_file = next(libdir(prefix).glob("pkgconfig/headway.pc")).read_text().split("features=")[1].split("\n")[0]
    if not features or features != in_pc_file:
        fail(f"the CMake package says it has '{features}', the .pc file '{in_pc_file}'")


def pkg_config(args, prefix):
    tool = shutil.which("pkg-config") or shutil.which("pkgconf")
    if not tool:
        skip("there is no pkg-config here")
    environment = dict(os.environ, PKG_CONFIG_PATH=f"{libdir(prefix)}/pkgconfig", LD_LIBRARY_PATH=str(libdir(prefix)))
    found = run(tool, "--modversion", "headway", env=environment).strip()
    if found != project_version(args.source):
        fail(f"headway.pc has version {found}, expected {project_version(args.source)}")
    for extra in ([], ["--static"]):
        flags = run(tool, "--cflags", "--libs", *extra, "headway", env=environment).split()
        program = prefix.parent / "with_pkg_config"
        run(args.cxx, "-std=c++20", args.source / "tests/install/outside/main.cpp", *flags, "-o", program)
        check_output(args, run(program, env=environment))


def older_language(args, prefix):
    """A program in C++17 is told so in one line, whichever header it includes."""
    program = prefix.parent / "older.cpp"
    for header in sorted((prefix / "include/headway").glob("*.h")):
        program.write_text(f"#include <headway/{header.name}>\nint main() {{ headway::Tensor tensor({{1}}); }}\n")
        command = [args.cxx, "-std=c++17", f"-I{prefix}/include", "-fsyntax-only", program]
        said = subprocess.run([str(part) for part in command], text=True, capture_output=True).stderr
        errors = [line for line in said.splitlines() if "error: " in line]
        if len(errors) != 2 or "Headway needs C++20: compile with -std=c++20" not in errors[0]:
            fail(f"{header.name}: expected one error about C++20 and the end of the compilation, found\n{said}")


def check_output(args, output):
    expected = EXPECTED.format(version=project_version(args.source))
    if output != expected:
        fail(f"expected the output\n{expected}\nfound\n{output}")


main()
