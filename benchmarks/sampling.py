"""Timing a case: every contender in turn, several rounds, each sample between two measurements of the peak."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import native

Call = Callable[[], object]
HELD_BACK = 0.95  # of the peak: below it something else has the machine


@dataclass
class Case:
    """One row of the table: what is done, how much work that is, and who does it."""

    group: str
    name: str
    work: float  # useful floating-point operations or, for peak "read", bytes
    peak: str  # what bounds it: f32, avx2, bf16 or read
    # "headway" and its peers, and for peak "read" what only reads: "reading". Made when the case begins.
    contenders: Callable[[], dict[str, Call]]
    notes: dict[str, str] = field(default_factory=dict)


@dataclass
class Machine:
    """The peaks of this run. A sample taken while the machine ran well below them says nothing and is dropped."""

    threads: int
    peaks: dict[str, float]

    @staticmethod
    def measure(threads: int) -> Machine:
        kinds = ("f32", "avx2", "bf16")
        peaks = {kind: max(native.peak(kind, threads, 0.1) for _ in range(10)) for kind in kinds}
        return Machine(threads, peaks)

    def look(self) -> float:
        """The share of the f32 peak that the machine can give right now."""
        return native.peak("f32", self.threads, self._moment()) / self.peaks["f32"]

    def settle(self) -> float:
        """Such a look when nothing else runs: a library may still be freeing the memory of its last call."""
        for _ in range(20):
            if native.rate(self.threads, self._moment()) / self.peaks["f32"] >= HELD_BACK:
                break
        return self.look()

    def _moment(self) -> float:
        return 0.02 if self.threads > 1 else 0.005


def _time(call: Call, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def _repeats(call: Call, least_seconds: float) -> int:
    call()
    return max(1, round(least_seconds / _time(call, 1)))


def run(case: Case, machine: Machine, *, rounds: int = 7, least_seconds: float = 0.05, budget: float = 20.0) -> dict:
    """The median rate of each contender, over the rounds in which the machine was not held back."""
    calls = case.contenders()
    repeats = {who: _repeats(call, least_seconds) for who, call in calls.items()}
    samples: dict[str, list[float]] = {who: [] for who in calls}
    dropped = 0
    begin = time.perf_counter()
    for round_ in range(3 * rounds):
        for who, call in calls.items():
            before = machine.settle()
            seconds = _time(call, repeats[who])
            after = machine.look()
            if min(before, after) < HELD_BACK:
                dropped += 1
            else:
                samples[who].append(seconds)
        if min(map(len, samples.values())) >= rounds:
            break
        if time.perf_counter() - begin > budget and min(map(len, samples.values())) >= 3:
            break
        if time.perf_counter() - begin > 4 * budget and round_ >= 2:
            break
    rates = {who: case.work / statistics.median(times) for who, times in samples.items() if times}
    peak = rates.pop("reading", 0.0) if case.peak == "read" else machine.peaks[case.peak]
    peers = {who: rate for who, rate in rates.items() if who != "headway"}
    best = max(peers, key=peers.__getitem__) if peers else None
    result = {
        "group": case.group,
        "name": case.name,
        "threads": machine.threads,
        "peak": case.peak,
        "peak_rate": peak,
        "rates": rates,
        "samples": {who: len(times) for who, times in samples.items()},
        "dropped": dropped,
        "notes": case.notes,
    }
    if "headway" in rates and peak:
        result["share"] = rates["headway"] / peak
        result["best_peer"] = best
        result["ratio"] = rates["headway"] / peers[best] if best else None
    return result
