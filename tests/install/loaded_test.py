"""A file that is not this build's libheadway_cuda.so is refused with a reason, before any of its code is called.

loaded_test.py ...

A program with src/engines/cuda_loaded/loaded.cpp in it stands for a libheadway that was built for the library; an empty
libcuda.so.1 stands for a driver.
"""

import os
import pathlib
import re
import shutil

from script import arguments, fail, libdir, project_version, run

EARLIER = 'struct Table { const char* version; void* rest[16]; } table{"VERSION"};'
FILES = {  # what lies there, as C++ source or as text; the reason
    "nothing": (
        None,
        "its library could not be loaded: FILE: cannot open shared object file: No such file or directory",
    ),
    "a text": ("hello", "its library could not be loaded: FILE: file too short"),
    "another library": ("int something() { return 1; }", "NOT_OURS"),
    "one of an earlier build": (EARLIER + 'extern "C" Table* headway_cuda_table() { return &table; }', "NOT_OURS"),
    "data of that name": ('extern "C" { int headway_cuda_table = 5; }', "NOT_OURS"),
}


def main():
    args = arguments()
    folder = args.scratch / "loaded"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    version = project_version(args.source)
    library = libdir(args.scratch / "shared" / "prefix") / "libheadway.so"
    program, file = folder / "program", folder / "libheadway_cuda.so"
    run(
        args.cxx,
        *("-std=c++20", f"-I{args.source}/include", f"-I{args.source}/src"),
        "-DHEADWAY_CUDA_TABLE=headway_cuda_table_of_this_build",
        args.source / "tests/install/loaded/main.cpp",
        args.source / "src/engines/cuda_loaded/loaded.cpp",
        *(library, f"-Wl,-rpath,{library.parent}", "-ldl", "-o", program),
    )
    shared_library(args, "", folder / "libcuda.so.1")
    environment = dict(os.environ, LD_LIBRARY_PATH=str(folder))
    for name, (content, reason) in FILES.items():
        file.unlink(missing_ok=True)
        if name == "a text":
            file.write_text(content)
        elif content is not None:
            shared_library(args, content.replace("VERSION", version), file)
        reason = reason.replace(
            "NOT_OURS", f"FILE is not the CUDA engine that was built with this libheadway {version}"
        )
        reason = reason.replace("FILE", str(file))
        found = run(program, env=environment)
        if found != f"{reason}\nthe CUDA engine: {reason}\n":
            fail(f"with {name} expected\n{reason}\nfound\n{found}")
    check_truncated(args, program, file, environment)


def check_truncated(args, program, file, environment):
    """A copy that was interrupted, cut anywhere: dlopen itself would end the program."""
    shared_library(args, "char zeros[1000000] = {1}; int something() { return zeros[5]; }", file)
    whole = file.read_bytes()
    reasons = set()
    for percent in range(0, 100, 5):
        file.write_bytes(whole[: len(whole) * percent // 100])
        found = run(program, env=environment).splitlines()[0]
        reasons.add(re.sub(r"\d+", "N", found.replace(str(file), "FILE")))
    expected = {
        "its library could not be loaded: FILE: file too short",
        "its library is incomplete: FILE has N of at least N bytes",
    }
    if reasons != expected:
        fail(f"of truncated libraries expected\n{expected}\nfound\n{reasons}")


def shared_library(args, text, file: pathlib.Path):
    source = file.with_suffix(".cpp")
    source.write_text(text)
    run(args.cxx, "-shared", "-fPIC", source, "-o", file)


main()
