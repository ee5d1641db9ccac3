"""How a program ends while calls, servers and results of them are still there: with its own status, and in silence."""

import contextlib
import http.client
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import headway

WORKING = """
import threading, time
import numpy as np
import headway

x = np.ones((1, 1, 20000, 64), np.float32)
out, lse = headway.attention(x[:, :, :8], x, x, return_lse=True)
y = x[0, 0]
started = threading.Event()

def work():
    started.set()
    while True:
        CALL

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
started.wait()
time.sleep(0.02)
"""

CALLS = {
    "attention": "headway.attention(x[:, :, :3000], x[:, :, :3000], x[:, :, :3000])",
    "many short ones": "headway.attention(x[:, :, :1], x[:, :, :9], x[:, :, :9])",
    "attention_backward": "headway.attention_backward(out, x[:, :, :8], x, x, out, lse)",
    "attention_scores": "headway.attention_scores(y[:3000], y)",
    "analyze": "headway.analyze(y, y, engine='reference')",
    "a progress bar": "headway.analyze(y[:300], y[:300], progress=True)",
    "trace": "headway.trace(y[:30], y[:30], y[:30])",
    "view": "headway.view(y[:3000], y[:3000], path=__file__ + '.html', overwrite=True)",
    "serve": "headway.view(y[:3000], y[:3000], serve=True).close()",
}


def run(program, tmp_path):
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("call", CALLS)
def test_a_program_ends_well_in_the_middle_of_daemon_threads_calls(call, tmp_path):
    ended = run(WORKING.replace("CALL", CALLS[call]), tmp_path)
    assert ended.returncode == 0 and ended.stderr == ""


def test_a_program_that_still_holds_results_at_its_end_says_nothing_of_them(tmp_path):
    program = """
import threading
import numpy as np
import headway

x = np.eye(4)
ready = threading.Event()

def hold():
    kept = [headway.trace(x, x, x), headway.explain(x, x, x), headway.view(x, x, serve=True)]
    ready.set()
    threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
ready.wait()
"""
    ended = run(program, tmp_path)
    assert ended.returncode == 0 and ended.stderr == ""


# ---- A server's end ----

SERVING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np, headway
x = np.random.default_rng(0).standard_normal((3000, 16)).astype(np.float32)
headway.view(x, x, serve=True).wait()
print("over")
"""


def connection_to(url):
    """An open connection to a server, and the path of its page."""
    host, path = url.removeprefix("http://").split("/", 1)
    return contextlib.closing(http.client.HTTPConnection(host, timeout=20)), "/" + path


def keep_asking(url):
    closing, path = connection_to(url)
    with closing as connection, contextlib.suppress(OSError, http.client.HTTPException):  # when the server is gone
        while True:
            connection.request("GET", path + "tile?head=0&r0=0&r1=3000&k0=0&k1=3000")
            assert connection.getresponse().read()


def test_control_c_ends_a_server_well_in_the_middle_of_its_answers():
    command = [sys.executable, "-c", SERVING]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    url = process.stdout.readline().split()[0]
    browsers = [threading.Thread(target=keep_asking, args=(url,)) for _ in range(4)]
    for browser in browsers:
        browser.start()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    for browser in browsers:
        browser.join()
    assert rest == "over\n" and errors == "" and process.returncode == 0


def test_close_ends_the_connections_that_are_open_and_their_threads():
    before = threading.active_count()
    server = headway.view(np.eye(4), np.eye(4), serve=True)
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(3):
            closing, path = connection_to(server.url)
            connections.append(stack.enter_context(closing))
            connections[-1].request("GET", path)
            assert connections[-1].getresponse().read()
            assert connections[-1].sock is not None  # it stays open for the next request
        server.close()
        assert threading.active_count() == before
        for connection in connections:
            assert connection.sock.recv(1) == b""
    server.close()
