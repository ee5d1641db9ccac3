"""Threads, forks, signals, pickles."""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import headway
from cases import HOST_ENGINES, random_case


def test_sixteen_threads_at_once_give_the_same_bits():
    cases = [random_case(seed, "float32") for seed in range(16)]
    expected = [headway.attention(*case.inputs, **case.options).tobytes() for case in cases]

    def work(number):
        case = cases[number]
        return all(headway.attention(*case.inputs, **case.options).tobytes() == expected[number] for _ in range(30))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_the_thread_count_changes_no_bit():
    x = np.random.default_rng(0).standard_normal((2, 4, 200, 32)).astype(np.float32)
    before = headway.get_threads()
    results = set()
    try:
        for threads in (1, 2, 3, 8):
            headway.set_threads(threads)
            out, lse = headway.attention(x, x, x, causal=True, return_lse=True)
            gradients = headway.attention_backward(out, x, x, x, out, lse, causal=True)
            results.add(b"".join(array.tobytes() for array in (out, lse, *gradients[:3])))
    finally:
        headway.set_threads(before)
    assert len(results) == 1


def long_call(engine="reference"):
    """Seconds of work on any machine."""
    x = np.broadcast_to(np.float32(0), (1, 64, 16384, 64))
    headway.attention(x, x, x, engine=engine)


def test_other_threads_run_meanwhile():
    x = np.zeros((1, 8, 512, 64), np.float32)
    done = threading.Event()

    def work():
        headway.attention(x, x, x, engine="reference")
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    ticks = 0
    while not done.is_set():
        ticks += 1
        time.sleep(0.001)
    worker.join()
    assert ticks > 5


@pytest.fixture
def heeded_interrupts():
    """A shell starts what runs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_call(engine):
    begin = time.monotonic()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        long_call(engine)
    assert time.monotonic() - begin < 10
    timer.join()
    x = np.ones((3, 4))
    assert np.array_equal(headway.attention(x, x, x), x)


@pytest.mark.parametrize("engine", HOST_ENGINES)
def test_control_c_stops_a_long_call_and_the_next_one_works(engine, heeded_interrupts):
    interrupted_call(engine)


def test_control_c_stops_a_call_on_the_threads_that_torch_lends(heeded_interrupts):
    pytest.importorskip("torch")
    importlib.import_module("headway.torch")
    for _ in range(5):  # which of the threads begins is chance
        interrupted_call("cpu")


def test_a_signal_handler_s_own_exception_comes_through():
    class Alarm(Exception):
        pass

    def handler(number, frame):
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Alarm):
            long_call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shared(heads, rows, seed):
    """(1, heads, rows, 64) of which all heads are one: much work over little memory."""
    one = np.random.default_rng(seed).standard_normal((1, 1, rows, 64)).astype(np.float32)
    return np.broadcast_to(one, (1, heads, rows, 64))


# Functions that return calls whose inputs are ready, and those the bytes of their results.


def decode(heads, keys, seed=0):
    query = np.random.default_rng(seed).standard_normal((1, heads, 1, 64)).astype(np.float32)
    inputs = query, shared(heads, keys, seed + 1), shared(heads, keys, seed + 2)
    return lambda: headway.attention(*inputs).tobytes()


def prefill(heads, rows, seed=0):
    inputs = [shared(heads, rows, seed + n) for n in range(3)]
    return lambda: headway.attention(*inputs, causal=True).tobytes()


def backward(heads, rows, seed=0):
    inputs = [shared(heads, rows, seed + n) for n in range(3)]
    out, lse = headway.attention(*inputs, return_lse=True)
    return lambda: b"".join(x.tobytes() for x in headway.attention_backward(out, *inputs, out, lse)[:3])


# Each takes a few times the 50 ms after which a call looks for signals.
LONG_CALLS = {"decode": (decode, 1024, 16384), "prefill": (prefill, 8, 3000), "backward": (backward, 8, 1500)}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_a_signal_handler_may_call_the_library_in_the_middle_of_a_call(name):
    make, *sizes = LONG_CALLS[name]
    call = make(*sizes)
    inner = [decode(1024, 2048, seed=7), prefill(4, 300, seed=7), backward(4, 300, seed=7)]
    expected, expected_inner = call(), [one() for one in inner]
    found = []

    def handler(number, frame):
        found.append([one() for one in inner])

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(2):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            assert call() == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(found) == 2 and all(results == expected_inner for results in found)


FORKING = """
import multiprocessing, os
import numpy as np
import headway

x = np.random.default_rng(0).standard_normal((2, 8, 256, 32)).astype(np.float32)

def result(_=None):
    return headway.attention(x, x, x, causal=True).tobytes()

expected = result()
child = os.fork()
if child == 0:
    os._exit(0 if result() == expected else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(result, range(6)) == 6 * [expected]
assert result() == expected
"""


def test_a_fork_after_use_works():
    # In a process of its own: other libraries that are loaded here may not stand a fork.
    command = [sys.executable, "-W", "ignore", "-c", FORKING]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "HEADWAY_THREADS": "4"})


def test_importing_starts_no_thread():
    program = "import numpy as np, os; before = len(os.listdir('/proc/self/task')); import headway\n"
    program += "assert len(os.listdir('/proc/self/task')) == before"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_functions_and_layers_can_be_pickled():
    for function in (headway.attention, headway.attention_varlen_backward, headway.multi_head_attention):
        assert pickle.loads(pickle.dumps(function)) is function
    layer = headway.MultiHeadAttention(4, 2)
    x = np.ones((1, 3, 4))
    assert np.array_equal(pickle.loads(pickle.dumps(layer)).forward(x, x, x), layer.forward(x, x, x))
    gradients = headway.Gradients(x, x, x)
    assert pickle.loads(pickle.dumps(gradients)).bias is None
