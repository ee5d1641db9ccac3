"""./dev bench gpu --random and ./dev bench cpu --random: Headway beside its peers on randomly drawn cases.

    ./dev bench gpu --random --seed 7 --cases 100
    ./dev bench gpu --case "decode b8 h32/8 q1 k4096 d128 bf16 bhsd"

draws.py says what is drawn. Each case is called through headway.torch and through every peer that takes it: forward,
backward where its kind is trained, and on the GPU also from CUDA graphs, where the host's time does not count. Samples
are short and alternate; medians are compared. A figure is the time of the fastest peer over ours: more than 1x is
faster. Results are compared too. A contender that ends its process, or leaves the GPU's context unusable, is named
among those that refused the case, and the case runs again without that pass of it, in a new process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import draws

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, LEAST_SECONDS = 5, {"gpu": 0.003, "cpu": 0.01}
HOPELESS = 3.0  # times the fastest peer: a peer that is slower than this in its first call is not timed further
CASE_SECONDS = 180.0  # a case that takes longer has hung
GRAPH_SECONDS, GRAPH_CALLS = 0.0005, 32  # a graph holds as many calls as fill this time
Call = Callable[[], object]


class Lost(Exception):
    """A contender left the device in a state in which nothing can be timed any more."""

    def __init__(self, step: str, error: Exception) -> None:
        super().__init__(first_line(error))
        self.step = step


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("random draws")
    group.add_argument("--random", action="store_true", help="draw cases instead of running the table")
    group.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    group.add_argument("--cases", type=int, default=100, help="how many (default 100)")
    group.add_argument("--first", type=int, default=0, metavar="N", help="go on with case N, in --save's file")
    group.add_argument("--case", metavar="TEXT", help="one case again, as the report names it")
    group.add_argument("--save", type=Path, metavar="FILE", help="where the figures go (default build/random-*.json)")


# ---- One case ----


class Bench:
    """One process: where cases run, and how a call is timed there."""

    def __init__(self, machine: str, threads: int) -> None:
        import torch

        self.torch, self.machine, self.threads = torch, machine, threads
        self.graphs: list[Any] = []  # in whose memory results lie that are still read
        self.lost: dict[str, str] = {}  # steps that ended a process before, and how: left out now
        self.device = torch.device("cuda" if machine == "gpu" else "cpu")
        if machine == "gpu":
            # Graphs are captured on a stream of their own, and backward runs on the stream of its forward.
            torch.cuda.set_stream(torch.cuda.Stream())

    def wait(self) -> None:
        if self.machine == "gpu":
            self.torch.cuda.synchronize()

    def clean(self) -> None:
        self.wait()
        if self.machine == "gpu":
            self.torch.cuda.empty_cache()

    def seconds(self, call: Call, repeats: int) -> float:
        """A call's share of a burst, the host's time included."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        self.wait()
        return (time.perf_counter() - begin) / repeats

    def may_run(self, who: str, what: str, refused: dict[str, str]) -> bool:
        """Says which step begins, for the process that watches; False for one that ended a process before."""
        step = f"{who}, {what}"
        if step in self.lost:
            refused[step] = self.lost[step]
            return False
        print(json.dumps({"step": step}), flush=True)
        return True

    def refuse(self, who: str, what: str, error: Exception, refused: dict[str, str]) -> None:
        """Notes why a contender does not take a case; ours must, but for a graph."""
        try:
            self.wait()
        except RuntimeError:
            raise Lost(f"{who}, {what}", error) from error
        if who == "headway" and not what.endswith("graphs"):
            raise error
        refused[who if what == "forward" else f"{who}, {what}"] = first_line(error)

    def first(self, who: str, what: str, call: Call, refused: dict[str, str]) -> float | None:
        """The time of a warm call; None where the contender does not take the case."""
        try:
            self.seconds(call, 1)
            return min(self.seconds(call, 1) for _ in range(5 if self.seconds(call, 1) < 0.02 else 1))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            self.refuse(who, what, error, refused)
            return None

    def times(self, what: str, calls: dict[str, tuple[Call, Any]], refused: dict[str, str]) -> dict[str, float]:
        """The median time of each contender's call, in rounds; calls are (call, context)."""
        known: dict[str, float] = {}
        for who, (call, context) in calls.items():
            if not self.may_run(who, what, refused):
                continue
            with context():
                found = self.first(who, what, call, refused)
            if found is not None:
                known[who] = found
        fastest = min((t for who, t in known.items() if who != "headway"), default=math.inf)
        kept = [who for who, t in known.items() if who == "headway" or t <= HOPELESS * fastest]
        repeats = {who: max(1, math.ceil(LEAST_SECONDS[self.machine] / known[who])) for who in kept}
        samples: dict[str, list[float]] = {who: [] for who in kept}
        for turn in range(ROUNDS):
            for who in kept if turn % 2 == 0 else kept[::-1]:
                call, context = calls[who]
                with context():
                    samples[who].append(self.seconds(call, repeats[who]))
        return known | {who: statistics.median(values) for who, values in samples.items()}

    def graph(self, call: Call, seconds: float) -> tuple[Call, int]:
        """A replay of so many calls."""
        torch, count = self.torch, max(1, min(GRAPH_CALLS, round(GRAPH_SECONDS / seconds)))
        graph = torch.cuda.CUDAGraph()
        self.wait()
        graph.capture_begin()
        try:
            for _ in range(count):
                call()
        except BaseException:
            with suppress(RuntimeError):  # of the capture that failed: the first error says more
                graph.capture_end()
            raise
        graph.capture_end()
        graph.replay()
        self.wait()
        return graph.replay, count

    def recorded_in_graph(self, contender: Any, inputs: Any) -> Call | None:
        """The backward of a forward that was captured too.

        Torch's kernels keep dropout's seed in device memory while a stream is captured, else in host memory, and the
        backward takes it for what its own time says: a captured backward of an eager forward reads a host address on
        the GPU.
        """
        import contest

        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        self.wait()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            backward = contest.gradients(contender, inputs)
        graph.replay()
        self.wait()
        self.graphs.append(graph)
        return backward

    def graph_times(
        self, what: str, calls: dict[str, tuple[Call, Any]], plain: dict[str, float], refused: dict[str, str]
    ) -> dict[str, float]:
        """As times, from CUDA graphs: those of plain that were not hopeless."""
        fastest = min((t for who, t in plain.items() if who != "headway"), default=math.inf)
        replays: dict[str, tuple[Call, Any]] = {}
        counts = {}
        for who, seconds in plain.items():
            if who != "headway" and seconds > HOPELESS * fastest:
                continue
            if who not in calls or not self.may_run(who, what, refused):
                continue
            call, context = calls[who]
            try:
                with context():
                    replay, counts[who] = self.graph(call, seconds)
                replays[who] = (replay, nullcontext)
            except RuntimeError as error:
                self.refuse(who, what, error, refused)
        found = self.times(what, replays, refused)
        return {who: seconds / counts[who] for who, seconds in found.items()}

    def captured(
        self, calls: dict[str, tuple[Call, Any]], contenders: dict[str, Any], inputs: Any, refused: dict[str, str]
    ) -> dict[str, tuple[Call, Any]]:
        """The same backwards, each after a forward that was captured."""
        found = {}
        for who, (_, context) in calls.items():
            what = "forward of backward, graphs"
            if not self.may_run(who, what, refused):
                continue
            try:
                call = self.recorded_in_graph(contenders[who], inputs)
            except RuntimeError as error:
                self.refuse(who, what, error, refused)
                continue
            if call is not None:
                found[who] = (call, context)
        return found

    def run(self, draw: draws.Draw) -> dict[str, Any]:
        """A case's times by what was timed, how far results are apart, who refused it, and our plans."""
        import contest

        inputs = contest.Inputs(draw, self.device)
        refused: dict[str, str] = {}
        contenders = {"headway": contest.ours(inputs), **contest.peers(inputs, self.threads)}
        forward = {who: (one.forward, one.context) for who, one in contenders.items()}
        times = {"forward": self.times("forward", forward, refused)}
        plans = {"forward": str(contest.plan(inputs, backward=False))}
        backward: dict[str, tuple[Call, Any]] = {}
        if draw.trained:
            for who in times["forward"]:
                call = contest.gradients(contenders[who], inputs)
                if call is not None:
                    backward[who] = (call, contenders[who].context)
            times["backward"] = self.times("backward", backward, refused)
            plans["backward"] = str(contest.plan(inputs, backward=True))
        if self.machine == "gpu":
            if draw.dropout:
                backward = self.captured(backward, contenders, inputs, refused)
            for name, calls in (("forward", forward), ("backward", backward)):
                if calls:
                    what = f"{name}, graphs"
                    times[what] = self.graph_times(what, calls, times[name], refused)
        result = {"times": times, "plans": plans, "refused": refused}
        best = fastest_peer(times["forward"])
        del inputs, contenders, forward, backward
        self.graphs.clear()
        if best:
            far = contest.distances(draw, self.device, best, self.threads)
            result |= {"distances": far, "agrees": max(far.values()) <= contest.TOLERANCE[draw.dtype]}
        return result


def fastest_peer(times: dict[str, float]) -> str | None:
    return min((who for who in times if who != "headway"), key=times.__getitem__, default=None)


# ---- Processes ----


def child(machine: str, threads: int, cases: list[str], lost: dict[str, str]) -> None:
    """Runs cases; a line of JSON when each begins, for each step of it, and with its result.

    Steps in lost are left out of the first case.
    """
    import warnings

    if machine == "cpu":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HEADWAY_THREADS"):
            os.environ[name] = str(threads)
    warnings.filterwarnings("ignore")  # torch's, of each backend that refuses a case
    bench = Bench(machine, threads)
    bench.lost = lost
    for number, text in enumerate(cases):
        print(json.dumps({"begins": number}), flush=True)
        try:
            result = bench.run(draws.parse(text))
        except Lost as error:
            print(json.dumps({"step": error.step, "lost": str(error)}), flush=True)
            os._exit(1)  # what is queued on the device cannot be waited for
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        print(json.dumps({"case": text, **result}), flush=True)
        bench.lost = {}
        bench.clean()  # raises where an error of the device has left nothing to go on with


def results(machine: str, threads: int, cases: list[str]) -> Iterator[dict[str, Any]]:
    """The result of every case, from as many processes as it takes."""
    rest, lost = cases, {}
    while rest:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", machine, "--threads", str(threads)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"cases": rest, "lost": lost}))
        process.stdin.close()
        begun, done = 0, 0
        step, why = "", ""  # the last one begun, and what it said of its end
        watch = _watch(process)
        for line in process.stdout:
            watch.cancel()
            watch = _watch(process)
            if not line.startswith("{"):
                continue
            found = json.loads(line)
            if "begins" in found:
                begun = found["begins"] + 1
                step, why = "", ""
            elif "step" in found:
                step, why = found["step"], found.get("lost", "")
            else:
                done += 1
                lost = {}
                yield found
        watch.cancel()
        status = process.wait()
        if begun == 0:
            raise SystemExit(f"bench {machine} --random: the process ended with status {status} before its first case")
        if done < begun:
            why = f"the process ended with status {status}" + (f": {why}" if why else "")
            if step and not step.startswith("headway") and step not in lost:
                lost = lost | {step: why}
            else:
                yield {"case": rest[done], "failed": f"{step}: {why}" if step else why}
                lost = {}
                done += 1
        rest = rest[done:]


def _watch(process: subprocess.Popen[str]) -> threading.Timer:
    timer = threading.Timer(CASE_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    return timer


# ---- The report ----


def ratio(times: dict[str, float]) -> float | None:
    best = fastest_peer(times)
    return times[best] / times["headway"] if best and "headway" in times else None


def duration(seconds: float) -> str:
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def said(times: dict[str, float]) -> str:
    return ", ".join(f"{who} {duration(t)}" for who, t in sorted(times.items(), key=lambda one: one[1]))


def print_case(number: int, result: dict[str, Any]) -> None:
    if "failed" in result:
        print(f"{number:4}  FAILED  {result['case']}: {result['failed']}", flush=True)
        return
    found = {name: ratio(times) for name, times in result["times"].items()}
    text = "  ".join(f"{name} {value:.2f}x" for name, value in found.items() if value is not None)
    wrong = "" if result.get("agrees", True) else f"  DISAGREES {result['distances']}"
    print(f"{number:4}  {result['case']}:  {text}{wrong}", flush=True)


def distribution(values: list[float]) -> str:
    values = sorted(values)
    fifth = values[min(len(values) - 1, int(0.05 * len(values)))]
    mean = math.exp(statistics.fmean(map(math.log, values)))
    return f"{len(values):5}  {values[0]:6.2f}x {fifth:6.2f}x {statistics.median(values):6.2f}x {mean:9.2f}x"


def print_report(found: list[dict[str, Any]], machine: str) -> None:
    good = [r for r in found if "times" in r]
    for name in dict.fromkeys(name for r in good for name in r["times"]):
        rows = [(value, r) for r in good if name in r["times"] and (value := ratio(r["times"][name])) is not None]
        if not rows:
            continue
        print(f"\n{name + ', the fastest peer over Headway':47} cases   least     5 %  median  geometric mean")
        print(f"  {'all':45} {distribution([value for value, _ in rows])}")
        words = [*draws.LIMITS[machine].types, *draws.KINDS]
        for word in words:
            some = [value for value, r in rows if word in r["case"].split()]
            if some and len(some) < len(rows):
                print(f"  {word:45} {distribution(some)}")
        print("  the ten worst:")
        for value, r in sorted(rows, key=lambda row: row[0])[:10]:
            plan = r["plans"][name.split(",")[0]]
            print(f"    {value:.2f}x  {r['case']}\n           {said(r['times'][name])}\n           {chosen(plan)}")
    _print_faults(found)


def chosen(plan: str) -> str:
    """The line of a plan that names its kernel; the whole plan is in the file, and `--case` prints it."""
    return next((line.strip() for line in plan.splitlines() if line.split()[:1] == ["kernel"]), plan.splitlines()[0])


def _print_faults(found: list[dict[str, Any]]) -> None:
    wrong = [r for r in found if not r.get("agrees", True)]
    failed = [r for r in found if "failed" in r]
    refused = [
        (r, error)
        for r in found
        for step, error in r.get("refused", {}).items()
        if step.startswith("headway, ") and step.endswith("graphs")
    ]
    print(f"\n{len(found)} cases: {len(failed)} failed, {len(wrong)} with results that differ from the fastest peer's")
    for r in failed:
        print(f"  failed: {r['case']}: {r['failed']}")
    for r in wrong:
        print(f"  differs: {r['case']}: {r['distances']}")
    for r, error in refused:
        print(f"  no graph: {r['case']}: {error}")


def print_one(result: dict[str, Any]) -> None:
    for name, times in result.get("times", {}).items():
        value = ratio(times)
        print(f"\n{name}: {said(times)}{f'; {value:.2f}x' if value else ''}")
    for name, text in result.get("plans", {}).items():
        print(f"\n{name}: {text}")
    for who, error in result.get("refused", {}).items():
        print(f"\n{who} refused: {error}")


def machine_text(machine: str, threads: int) -> str:
    import platform

    import torch

    if machine == "gpu":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in about.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {threads} threads, torch {torch.__version__}"


def earlier_results(where: Path, about: str, seed: int, first: int) -> list[dict[str, Any]]:
    """Cases 0 to first - 1, of a run that stopped there."""
    if first == 0:
        return []
    record = json.loads(where.read_text())
    if (record["machine"], record["seed"], len(record["results"])) != (about, seed, first):
        raise SystemExit(
            f"bench --random: {where} holds {len(record['results'])} cases of seed {record['seed']} on "
            f"{record['machine']}, expected {first} of seed {seed} on {about}"
        )
    return record["results"]


def main(machine: str, arguments: argparse.Namespace, threads: int) -> None:
    cases = [arguments.case] if arguments.case else []
    first = arguments.first
    cases = cases or [str(draws.draw(machine, arguments.seed, first + index)) for index in range(arguments.cases)]
    about = machine_text(machine, threads)
    where = arguments.save or ROOT / f"build/random-{machine}-seed{arguments.seed}.json"
    begin, found = time.perf_counter(), earlier_results(where, about, arguments.seed, first)
    print(f"{about}\n{'one case' if arguments.case else f'seed {arguments.seed}, {len(cases)} cases'}", flush=True)
    for number, result in enumerate(results(machine, threads, cases)):
        found.append(result)
        print_case(first + number, result)
    if arguments.case:
        print_one(found[0])
        return
    print_report(found, machine)
    where.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": about, "seed": arguments.seed, "results": found}
    where.write_text(json.dumps(record, indent=1) + "\n")
    print(f'\n{time.perf_counter() - begin:.0f} s; written: {where}; a case again: ./dev bench {machine} --case "..."')


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", choices=["gpu", "cpu"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    own = parser.parse_args()
    given = json.loads(sys.stdin.read())
    child(own.child, own.threads, given["cases"], given["lost"])
