"""Threads and engines."""

from __future__ import annotations

from headway import _headway
from headway._arguments import whole_number


def set_threads(n: int) -> None:
    """Sets how many threads a call may use, the caller's own included. Results do not depend on it.

    >>> import headway
    >>> headway.set_threads(2)
    >>> headway.get_threads()
    2
    """
    count = whole_number("set_threads", "n", n, bits=None)
    # No machine has more threads than a C int can hold.
    _headway.set_threads(max(-(2**31), min(count, 2**31 - 1)))


def get_threads() -> int:
    """The number of threads that a call may use.

    It starts as HEADWAY_THREADS, else OMP_NUM_THREADS, else the number of CPUs that this process may run on.

    >>> import headway
    >>> headway.get_threads() >= 1
    True
    """
    return _headway.get_threads()


def release_memory() -> int:
    """Gives back to the system what is kept so that the next call need not ask for it; returns how many bytes.

    That is the memory of freed arrays (at most 256 MB), the scratch of each thread that made a call (64 MB) or worked
    on one (8 MB), and what the library's memory pools on GPUs hold and nobody uses. Calls in progress keep theirs;
    arrays, layers and caches are not touched.

    >>> import headway
    >>> headway.release_memory() >= 0
    True
    """
    return _headway.release_memory()


def engines() -> list[str]:
    """The engines of this build and machine, out of "cuda", "cpu" and "reference", the fastest first.

    >>> import headway
    >>> "reference" in headway.engines()
    True
    """
    return _headway.engines()
