"""Comparing what a program printed with what a page shows.

A line `...` stands for lines left out. Numbers may differ in the fourth digit: the last bits of exp() differ between
C libraries. What depends on the machine is not compared: times, and which engine and kernel it has for a call.
"""

import re

TIME = re.compile(r"[0-9.e+-]+ (ns|us|µs|ms|s)\b")
NUMBER = re.compile(r"(?<![\w.])-?[0-9]+\.[0-9]+(?:e[+-]?[0-9]+)?|(?<![\w.])-?[0-9]+e[+-]?[0-9]+")
ENGINE = re.compile(r"\b(cuda|cpu|reference)( engine\b)")
MACHINE_LINE = re.compile(r"^  (kernel|runs as|not on) ")
ELLIPSIS = "..."


def lines_of(text):
    """Lines without times and engines, and without those that depend on the machine."""
    lines = [ENGINE.sub(r"ENGINE\2", TIME.sub("TIME", line.rstrip())) for line in text.strip("\n").split("\n")]
    return [line for line in lines if line and not MACHINE_LINE.match(line)]


def matches(wanted, real):
    if not wanted:
        return not real
    if wanted[0] == ELLIPSIS:
        return any(matches(wanted[1:], real[skipped:]) for skipped in range(len(real) + 1))
    return bool(real) and same_line(wanted[0], real[0]) and matches(wanted[1:], real[1:])


def same_line(wanted, real):
    if NUMBER.sub("", wanted) != NUMBER.sub("", real):
        return False
    pairs = zip(NUMBER.findall(wanted), NUMBER.findall(real))
    return all(close(float(a), float(b)) for a, b in pairs)


def close(a, b):
    # Differences between roundings are printed too; there only the order of magnitude is worth comparing.
    return abs(a - b) <= 1e-3 * max(abs(a), abs(b)) or max(abs(a), abs(b)) < 1e-4
