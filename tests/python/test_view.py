"""The page that shows attention: as a file, from a server, and what an interrupt leaves behind."""

import base64
import errno
import gc
import html
import http.client
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import pytest

import headway
from headway._server import _serving

RANDOM = np.random.default_rng(3)
TOKENS = "the cat sat down .".split()


def page_data(page):
    """What a page's script reads."""
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])


def blob(data, name, dtype):
    return np.frombuffer(zlib.decompress(base64.b64decode(data["blobs"][name])), dtype)


def test_a_page_has_the_tokens_the_heads_and_the_options(tmp_path):
    x = RANDOM.standard_normal((1, 2, 5, 8))
    path = headway.view(x, x, tokens=TOKENS, title="Cats", path=tmp_path / "cat.html", causal=True)
    assert path == tmp_path / "cat.html"
    data = page_data(path.read_text())
    assert data["title"] == "Cats" and data["options"] == "causal"
    assert data["keyTokens"] == TOKENS and data["queryTokens"] == "same"
    assert [head["name"] for head in data["heads"]] == ["head 0", "head 1"]
    entropy = headway.analyze(x, x, causal=True).entropy.mean(-1)
    np.testing.assert_allclose([head["entropy"] for head in data["heads"]], entropy[0], rtol=1e-12)


def test_a_page_names_the_options_that_were_asked_for_and_no_others(tmp_path):
    x = RANDOM.standard_normal((2, 6, 16))

    def named(query, **options):
        return page_data(headway.view(query, x, path=tmp_path / "a.html", overwrite=True, **options).read_text())[
            "options"
        ]

    assert named(x) == "" and named(x, scale=float(np.float32(16**-0.5))) == ""  # the scale that is there anyway
    assert named(x, scale=0.5, softcap=3.0) == "scale 0.5, softcap 3"
    assert named(x, causal=True, window=(2, None)) == "causal, window (2, unlimited)"
    assert named(x[:, :4], causal="top_left") == "causal top_left"
    assert named(x, causal="bottom_right", valid_lens=[3, 4]) == "causal bottom_right, valid_lens [B]"


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
    with pytest.raises(FileExistsError, match="a.html"):
        headway.view(x, x, path=path)
    assert path.read_text() == "mine"
    headway.view(x, x, path=path, overwrite=True)
    assert "<canvas" in path.read_text()


def test_without_a_path_a_page_takes_the_place_of_the_last_one_and_of_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.eye(3)
    assert headway.view(x, x, title="first") == headway.view(x, x, title="second") == Path("attention.html")
    assert page_data(Path("attention.html").read_text())["title"] == "second"
    Path("attention.html").write_text("mine")
    with pytest.raises(OSError, match="^view: attention.html: the file exists"):
        headway.view(x, x)
    assert Path("attention.html").read_text() == "mine"


def test_a_page_is_a_path_that_a_notebook_shows_as_the_page(tmp_path):
    x = np.eye(3)
    page = headway.view(x, x, tokens=['"', "<b>", "&"], path=tmp_path / "a.html")
    assert isinstance(page, Path) and page.stat().st_size > 10_000
    shown = page._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and shown.count("<") == 2
    assert html.unescape(re.search('srcdoc="(.*?)"', shown, re.DOTALL)[1]) == page.read_text()
    (tmp_path / "b.html").write_text("mine")
    assert page.with_name("b.html")._repr_html_() is None
    assert page.parent._repr_html_() is None


def test_weights_that_are_already_there_are_shown(tmp_path):
    scores = RANDOM.standard_normal((1, 2, 4, 6))
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    weights[0, 1, 2] = 0
    page = headway.view(weights=weights, tokens=list("abcdef"), query_tokens=list("wxyz"), path=tmp_path / "a.html")
    data = page_data(page.read_text())
    assert (data["queries"], data["keys"], data["layers"], data["options"]) == (4, 6, 1, "")
    np.testing.assert_allclose(blob(data, "weights", np.float32).reshape(1, 2, 4, 6), weights, rtol=1e-6, atol=1e-9)
    layers = [weights[0], weights[0, :, ::-1].astype(np.float32)]
    data = page_data(headway.view(weights=layers, path=tmp_path / "b.html").read_text())
    assert data["layers"] == 2 and [head["name"] for head in data["heads"]][::3] == [
        "layer 0, head 0",
        "layer 1, head 1",
    ]
    for wrong, error, text in [
        (weights[0, 0, 0], ValueError, r"view: weights has shape \(6,\), expected"),
        (2 * weights, ValueError, r"view: the row \(0, 0, 0\) of weights sums to 2, expected 1"),
        ([weights[0], -weights[0]], ValueError, r"view: weights\[1\] holds a negative number or NaN"),
        ([], ValueError, "view: weights is an empty list"),
        (np.array(["a"]), ValueError, "view: weights has shape"),
        (2 * [(weights[0], weights[0])], TypeError, r"view: weights\[0\] is itself a tuple of arrays, .* generation"),
    ]:
        with pytest.raises(error, match=text):
            headway.view(weights=wrong)
    with pytest.raises(ValueError, match="view: weights is given, and so is what weights come from"):
        headway.view(weights, weights=weights)
    with pytest.raises(TypeError, match="view: key is missing: expected query and key, or weights="):
        headway.view(weights)


@pytest.mark.parametrize("items, heads, length", [(80, 64, 40), (128, 128, 8), (1, 32, 163), (128, 128, 1)])
def test_a_page_stays_below_5_mb_at_any_number_of_heads(tmp_path, items, heads, length):
    x = RANDOM.standard_normal((items, heads, length, 4)).astype(np.float32)  # packing finds little in noise
    assert headway.view(x, x, path=tmp_path / "a.html").stat().st_size < 5_000_000


def test_a_page_has_a_limit_of_heads():
    x = np.zeros((128, 129, 1, 1))
    with pytest.raises(ValueError, match="^view: there are 16512 heads, expected at most 16384 in one page"):
        headway.view(x, x)


def test_errors_name_what_is_wrong(tmp_path):
    x, path = np.zeros((4, 2)), tmp_path / "a.html"
    for call, error, text in [
        (lambda: headway.view(x, x, path=path, tokens=["a"]), ValueError, "view: tokens has 1 entries, expected 4"),
        (lambda: headway.view(x, x, path=path, query_tokens="abcd"), TypeError, "view: query_tokens is a str"),
        (lambda: headway.view(x, x, path=path, tokens=["a", "b", 3, "d"]), TypeError, "entry 2 is a int"),
        (lambda: headway.view(x, x, path=path, head_names=["a", "b"]), ValueError, "head_names has 2"),
        (lambda: headway.view(x, x, path=path, causl=True), TypeError, r"^view\(\) .*'causal'"),
        (lambda: headway.view(x, [[1.0]], path=path), TypeError, "^view: key"),
        (lambda: headway.view(x, np.zeros((4, 3)), path=path), ValueError, "^view: key has head_dim 3"),
        (lambda: headway.view(x, x[:0], path=path), ValueError, "^view: there is nothing to show"),
        (lambda: headway.view(x, x[:0], serve=True), ValueError, "^view: there is nothing to show"),
        (lambda: headway.view(x, x, path=tmp_path / "no" / "a.html"), FileNotFoundError, "^view: .*no/a.html"),
        (lambda: headway.view(x, x, path=tmp_path / "a\x9b" / "a.html"), OSError, r"^view: .*a\\u009b/a.html"),
        (lambda: headway.view(x, x, serve=True, port=-1), OSError, "^view: cannot listen on port -1"),
        (lambda: headway.view(x, x, serve=True, port="8000"), TypeError, "^view: port is '8000', expected an integer"),
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
        assert client.status(path, host="localhost:" + str(client.url.port)) == 200
        assert client.status(path, host="localhost:1234") == 200  # a tunnel's own port
        assert client.status(path, host="localhost.example.org") == 403
        assert client.status(path + "tile?head=9&r0=0&r1=4&k0=0&k1=4") == 400
        for refused in ("/", path + "tile?head=9", path + "row?head=9", path + "other"):
            answer, body = client.ask(refused)
            assert answer.headers["Content-Type"].startswith("text/plain") and body.startswith(b"headway: ")
        assert client.status(path, method="POST") == 501
        other = headway.view(x, x, serve=True)
        assert urllib.parse.urlsplit(other.url).path != path
        other.close()
        other.close()
    with pytest.raises(OSError):
        client.ask(path)


def test_a_server_that_nobody_keeps_serves_until_the_program_ends():
    x = np.eye(4)
    url = headway.view(x, x, serve=True).url
    gc.collect()
    with urllib.request.urlopen(url) as page:
        assert page.status == 200
    (server,) = [server for server in _serving if server.url == url]
    server.close()
    assert server not in _serving


def test_a_server_listens_where_it_is_asked_to():
    x = np.eye(4)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^view: cannot listen on port {port}") as raised:
            headway.view(x, x, serve=True, port=port)
        assert raised.value.errno == errno.EADDRINUSE
    with headway.view(x, x, serve=True, port=port) as server:
        assert f":{port}/" in server.url
        with urllib.request.urlopen(server.url.replace("127.0.0.1", "localhost")) as page:
            assert page.status == 200


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


WITHOUT_TQDM = "import sys\nsys.modules['tqdm'] = None\n"


@pytest.mark.parametrize("with_tqdm, left", [(True, "<"), (False, "s left")])
def test_a_long_analysis_shows_one_line_of_progress_on_a_terminal(with_tqdm, left):
    if with_tqdm:
        pytest.importorskip("tqdm", reason="tqdm is not installed")
    ours, theirs = pty.openpty()
    process = start(("" if with_tqdm else WITHOUT_TQDM) + analyzing(5000), stderr=theirs)
    os.close(theirs)
    found = read_terminal(ours)
    os.close(ours)
    assert process.wait(timeout=20) == 0
    assert " %" in found and left in found and "\n" not in found and found.endswith("\r")


def test_a_long_analysis_is_quiet_in_a_pipe_unless_asked():
    for progress, shown in [("", False), (", progress=True", True)]:
        process = start(WITHOUT_TQDM + analyzing(5000, progress), stderr=subprocess.PIPE)
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
