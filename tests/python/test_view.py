"""The page that shows attention: as a file, from a server, and what an interrupt leaves behind."""

import http.client
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse

import numpy as np
import pytest

import headway

RANDOM = np.random.default_rng(3)
TOKENS = "the cat sat down .".split()


def page_data(page):
    """What a page's script reads."""
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])


def test_a_page_has_the_tokens_the_heads_and_the_options(tmp_path):
    x = RANDOM.standard_normal((1, 2, 5, 8))
    path = headway.view(x, x, tokens=TOKENS, title="Cats", path=tmp_path / "cat.html", causal=True)
    assert path == tmp_path / "cat.html"
    data = page_data(path.read_text())
    assert data["title"] == "Cats" and "causal" in data["options"]
    assert data["keyTokens"] == TOKENS and data["queryTokens"] == "same"
    assert [head["name"] for head in data["heads"]] == ["head 0", "head 1"]
    entropy = headway.analyze(x, x, causal=True).entropy.mean(-1)
    np.testing.assert_allclose([head["entropy"] for head in data["heads"]], entropy[0], rtol=1e-12)


def test_arrays_of_any_rank_type_and_library_are_shown(tmp_path):
    x = RANDOM.standard_normal((5, 8)).astype(np.float32)
    for n, array in enumerate([x, x[None], x[None, None].astype(np.float16)]):
        assert headway.view(array, array, path=tmp_path / f"{n}.html").stat().st_size > 10_000
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.randn(1, 4, 6, 8, dtype=torch.bfloat16)
    headway.view(tensor, tensor[:, :2, :4], path=os.fsencode(tmp_path / "torch.html"), query_tokens=list("abcdef"))


def test_an_existing_file_stays_unless_it_may_go(tmp_path):
    x, path = np.eye(3), tmp_path / "a.html"
    path.write_text("mine")
    with pytest.raises(OSError, match="a.html"):
        headway.view(x, x, path=path)
    assert path.read_text() == "mine"
    headway.view(x, x, path=path, overwrite=True)
    assert "<canvas" in path.read_text()


def test_errors_name_what_is_wrong(tmp_path):
    x, path = np.zeros((4, 2)), tmp_path / "a.html"
    for call, error, text in [
        (lambda: headway.view(x, x, path=path, tokens=["a"]), ValueError, "view: tokens has 1 entries, expected 4"),
        (lambda: headway.view(x, x, path=path, query_tokens="abcd"), TypeError, "view: query_tokens is a str"),
        (lambda: headway.view(x, x, path=path, tokens=["a", "b", 3, "d"]), TypeError, "entry 2 is a int"),
        (lambda: headway.view(x, x, path=path, head_names=["a", "b"]), ValueError, "head_names has 2"),
        (lambda: headway.view(x, x, path=path, causl=True), TypeError, "'causal'"),
        (lambda: headway.view(x, [[1.0]], path=path), TypeError, "key"),
        (lambda: headway.view(x, np.zeros((4, 3)), path=path), ValueError, "head_dim"),
        (lambda: headway.view(x, x[:0], path=path), ValueError, "nothing to show"),
        (lambda: headway.view(x, x, path=tmp_path / "no" / "a.html"), OSError, "no"),
        (lambda: headway.view(x, x, path=path, progress=3), TypeError, "progress is 3"),
        (lambda: headway.view(x, x, serve=True, tokens=["a"]), ValueError, "tokens has 1"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert list(tmp_path.iterdir()) == []


def test_tokens_of_any_kind_are_data(tmp_path):
    tokens = ["</script><script>alert(1)</script>", "\ud800", "\x00", "\u202eright to left", "x" * 100_000]
    x = RANDOM.standard_normal((5, 8))
    page = headway.view(x, x, tokens=tokens, path=tmp_path / "a.html").read_text()
    assert page.count("<script") == 2 and page.count("</script") == 2
    assert page_data(page)["keyTokens"] == [tokens[0], "\\ud800", *tokens[2:]]


# ---- The server ----


class Client:
    """Plain requests to a server of the page."""

    def __init__(self, server):
        self.url = urllib.parse.urlsplit(server.url)

    def ask(self, path, method="GET", host=None):
        connection = http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=10)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", self.url.netloc if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    def status(self, path, **how):
        return self.ask(path, **how)[0].status


def test_a_server_gives_the_page_and_exact_parts_to_who_knows_the_address():
    x = RANDOM.standard_normal((1, 2, 300, 8)).astype(np.float32)
    with headway.view(x, x, serve=True, causal=True) as server:
        client = Client(server)
        answer, body = client.ask(client.url.path)
        assert answer.status == 200 and answer.headers["Cache-Control"] == "no-store"
        assert page_data(body.decode())["live"] is True
        answer, body = client.ask(client.url.path + "tile?head=1&r0=200&r1=250&k0=0&k1=300")
        assert answer.status == 200 and answer.headers["X-Content-Type-Options"] == "nosniff"
        assert np.frombuffer(body, np.int32, 6).tolist() == [200, 0, 1, 1, 50, 300]
        cells = np.frombuffer(body, np.float32, offset=24).reshape(2, 50, 300)
        weights = headway.weights_in(x, x, (200, 250), (0, 300), causal=True)[0, 1]
        np.testing.assert_allclose(cells[0], weights, rtol=1e-5, atol=1e-9)
        np.testing.assert_array_equal(cells[0], cells[1])
        _, body = client.ask(client.url.path + "row?head=1&i=249")
        np.testing.assert_array_equal(np.frombuffer(body, np.int32, 8), np.argsort(-weights[49], kind="stable")[:8])


def test_a_server_refuses_everything_else():
    x = np.eye(4)
    with headway.view(x, x, serve=True) as server:
        client = Client(server)
        path = client.url.path
        assert client.url.hostname == "127.0.0.1" and re.fullmatch(r"/[a-z2-7]{26}/", path)
        assert client.status("/") == 404
        assert client.status("/tile?head=0&r0=0&r1=4&k0=0&k1=4") == 404
        assert client.status("/" + "a" * 26 + "/") == 404
        assert client.status(path + "../../etc/passwd") == 404
        assert client.status("/../../../etc/passwd") == 404
        assert client.status(path, host="example.org") == 403
        assert client.status(path, host="localhost:" + str(client.url.port)) == 403
        assert client.status(path + "tile?head=9&r0=0&r1=4&k0=0&k1=4") == 400
        assert client.status(path, method="POST") == 501
        other = headway.view(x, x, serve=True)
        assert urllib.parse.urlsplit(other.url).path != path
        other.close()
        other.close()
    with pytest.raises(OSError):
        client.ask(path)


def test_a_server_is_a_link_in_a_notebook():
    x = np.eye(4)
    with headway.view(x, x, serve=True) as server:
        assert server.url in repr(server) and f'href="{server.url}"' in server._repr_html_()


SERVING = """
import numpy as np, headway
headway.view(np.eye(4), np.eye(4), serve=True).wait()
print("over")
"""


def test_a_script_serves_until_control_c():
    process = start(SERVING, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    url = process.stdout.readline().split()[0]
    assert url.startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=20)
    assert rest == "over\n" and errors == "" and process.returncode == 0


def test_a_script_that_forgets_its_server_ends_in_silence():
    process = start(
        SERVING.replace(".wait()", "").replace("headway.view", "server = headway.view"), stderr=subprocess.PIPE
    )
    assert process.communicate(timeout=20)[1] == "" and process.returncode == 0


# ---- Progress and interrupts ----


def start(program, **streams):
    """A program with interrupts heeded, which a shell in the background would have it ignore."""
    heeded = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen([sys.executable, "-c", heeded + program], text=True, **streams)


ANALYZING = """
import numpy as np, headway
x = np.random.default_rng(0).standard_normal((SIZE, 4)).astype(np.float32)
headway.analyze(x, x, engine="reference"PROGRESS)
"""


def analyzing(size, progress=""):
    return ANALYZING.replace("SIZE", str(size)).replace("PROGRESS", progress)


def read_terminal(terminal, until=None, seconds=30):
    """What comes out of a terminal: all of it, or as far as a text."""
    found, end = "", time.monotonic() + seconds
    while time.monotonic() < end and (until is None or until not in found):
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        found += part.decode()
    return found


def test_a_long_analysis_shows_one_line_of_progress_on_a_terminal():
    ours, theirs = pty.openpty()
    process = start(analyzing(5000), stderr=theirs)
    os.close(theirs)
    found = read_terminal(ours)
    os.close(ours)
    assert process.wait(timeout=20) == 0
    assert " %  " in found and "s left" in found and "\n" not in found and found.endswith("\r")


def test_a_long_analysis_is_quiet_in_a_pipe_unless_asked():
    for progress, shown in [("", False), (", progress=True", True)]:
        process = start(analyzing(5000, progress), stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0 and ("s left" in err) == shown and (shown or err == "")


VIEWING = """
import numpy as np, headway
x = np.random.default_rng(0).standard_normal((60_000, 4)).astype(np.float32)
headway.view(x, x, path=PATH, engine="reference", overwrite=True)
"""


def test_control_c_stops_a_page_at_once_and_leaves_no_partial_file(tmp_path):
    (tmp_path / "a.html").write_text("old")
    ours, theirs = pty.openpty()
    process = start(VIEWING.replace("PATH", repr(str(tmp_path / "a.html"))), stderr=theirs)
    os.close(theirs)
    assert " %" in read_terminal(ours, until=" %")
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    reader = threading.Thread(target=read_terminal, args=(ours,))
    reader.start()
    assert process.wait(timeout=20) != 0
    assert time.monotonic() - begin < 5
    reader.join()
    os.close(ours)
    assert [file.name for file in tmp_path.iterdir()] == ["a.html"] and (tmp_path / "a.html").read_text() == "old"
