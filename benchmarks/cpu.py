"""./dev bench cpu: Headway beside its peers on this machine, in one run.

Every suite runs in a process of its own, bound to as many CPUs as it has threads, so that each library uses just those.
The table goes to the terminal. The numbers, a plot and the tables of README.md and docs/benchmarks.md are written at
the end, unless only some cases were asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import random_draws


def child(suite: str, threads: int, only: str, rounds: int) -> None:
    """One suite; a line of JSON for the machine, then one for each case."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HEADWAY_THREADS"):
        os.environ[name] = str(threads)

    import native
    import sampling
    import torch

    import cases

    torch.set_num_threads(threads)
    native.set_threads(threads)
    machine = sampling.Machine.measure(threads)
    print(json.dumps({"suite": suite, "threads": threads, "peaks": machine.peaks, "versions": versions()}), flush=True)
    for case in cases.SUITES[suite](threads):
        if only not in f"{case.group} {case.name}":
            continue
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = sampling.run(case, machine, rounds=rounds)
        if suite == "growth":
            result["grown_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(json.dumps(result), flush=True)


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("headway", "torch", "onnxruntime", "jax", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def run_suite(suite: str, threads: int, environment: dict[str, str], arguments: Any) -> tuple[dict, list[dict]]:
    import report

    command = [sys.executable, __file__, "--child", suite, "--threads", str(threads), "--only", arguments.only]
    command += ["--rounds", str(arguments.rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    assert process.stdout is not None
    machine: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    try:
        for line in process.stdout:
            data = json.loads(line)
            if not machine:
                machine = data
                report.print_machine(machine)
            else:
                results.append(data | {"suite": suite})
                report.print_result(data, first=len(results) == 1 or results[-2]["group"] != data["group"])
    except KeyboardInterrupt:
        process.kill()
        raise SystemExit("stopped; nothing was written") from None
    if process.wait() != 0:
        raise SystemExit(f"bench cpu: suite '{suite}', {threads} thread(s), ended with status {process.returncode}")
    return machine, results


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench cpu", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose group and name contain this")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each contender (default 7)")
    parser.add_argument("--threads", type=int, help="only this number of threads (default: 1 and all)")
    parser.add_argument("--suite", choices=["all", "avx2", "growth"], help="only this suite")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    random_draws.add_arguments(parser)
    arguments = parser.parse_args()
    everything = len(os.sched_getaffinity(0))
    if arguments.random or arguments.case:
        random_draws.main("cpu", arguments, arguments.threads or everything)
        return
    if arguments.child:
        child(arguments.child, arguments.threads, arguments.only, arguments.rounds)
        return

    import report

    counts = [arguments.threads] if arguments.threads else sorted({1, everything}, reverse=True)
    plan = [("all", threads, {}) for threads in counts]
    plan += [("avx2", threads, {"HEADWAY_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}) for threads in counts]
    plan += [("growth", counts[0], {})]
    machines, results = [], []
    for suite, threads, environment in plan:
        if arguments.suite in (None, suite):
            machine, found = run_suite(suite, threads, environment, arguments)
            machines.append(machine)
            results += found
    if arguments.only or arguments.suite:
        print("\nonly a part was run: nothing was written")
        return
    report.write(Path(__file__).resolve().parent, machines, results)


if __name__ == "__main__":
    main()
