"""The page in a real browser: Debian's Chromium, driven by playwright."""

import re
import shutil
import statistics
import time

import numpy as np
import pytest

import headway

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("there is no Chromium (Debian: chromium)", allow_module_level=True)

RANDOM = np.random.default_rng(11)
WORDS = "the animal didn't cross the street because it was too tired".split()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # The sandbox needs rights that containers lack; every page here is our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens an address and waits until the page is drawn; in the end nothing may have been an error."""
    contexts, errors = [], []

    def opened(address, **how):
        contexts.append(browser.new_context(viewport={"width": 1200, "height": 900}, **how))
        page = contexts[-1].new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(str(address))
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def oracle(q, k, causal=False):
    """Weights of [.., S, D] queries and keys, in float64."""
    scores = (q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def sentence(tmp_path_factory):
    """A page with words, and the weights that it should show."""
    q, k = (RANDOM.standard_normal((1, 3, len(WORDS), 16)).astype(np.float32) for _ in range(2))
    path = tmp_path_factory.mktemp("pages") / "sentence.html"
    headway.view(3 * q, k, tokens=WORDS, path=path, causal=True)
    return path.as_uri(), oracle(3 * q, k, causal=True)[0]


def wait_until(page, condition):
    """Asks until it is so; playwright's own way evaluates text inside the page, which its policy forbids."""
    end = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(10)


def cursor(page):
    return page.inner_text("#cursor")


def weight_shown(page):
    return float(re.search(r"weight (\S+)$", cursor(page))[1])


def point_at(page, i, j):
    """Moves the mouse over the middle of a cell."""
    x, y = page.evaluate(f"""(() => {{
        const box = matrix.getBoundingClientRect(), area = plotArea();
        return [box.left + xOf(area, {j} + 0.5), box.top + yOf(area, {i} + 0.5)];
    }})()""")
    page.mouse.move(x, y)
    wait_until(page, f"state.cursor.i === {i} && state.cursor.j === {j} && !waiting")


def colours(page, canvas):
    """How many pixels of a canvas are not empty."""
    return page.evaluate(f"""(() => {{
        const canvas = document.getElementById("{canvas}");
        const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return image.data.reduce((count, value, n) => count + (n % 4 === 3 && value > 0), 0);
    }})()""")


def test_a_file_opens_and_says_what_it_holds(open_page, sentence):
    page = open_page(sentence[0])
    assert page.title() == "Attention"
    assert "3 heads, 11 queries, 11 keys; causal" in page.inner_text("#subtitle")
    assert "Every weight is exact." in page.inner_text("footer")
    policy = page.get_attribute('meta[http-equiv="Content-Security-Policy"]', "content")
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    for canvas in ("matrix", "key-profile", "row-profile", "arcs", "legend"):
        assert colours(page, canvas) > 100, canvas


def test_the_policy_stops_a_script_that_is_not_the_page_s(browser, sentence):
    page = browser.new_page()
    page.goto(sentence[0])
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
    page.evaluate("""const script = document.createElement('script');
                     script.textContent = 'window.ran = 2'; document.body.append(script)""")
    page.wait_for_timeout(100)
    assert page.evaluate("window.ran") is None
    page.close()


def test_zooming_to_a_cell_shows_the_exact_weight(open_page, sentence):
    page, expected = open_page(sentence[0]), sentence[1]
    page.click("#overview button >> nth=2")
    assert page.inner_text("#head-name") == "head 2"
    for i, j in [(9, 1), (10, 10), (0, 0), (4, 7)]:
        point_at(page, i, j)
        assert weight_shown(page) == pytest.approx(expected[2, i, j], rel=2e-6, abs=1e-12)
        assert f"query {i} " in cursor(page) and WORDS[j] in cursor(page)
    x, y = page.evaluate("[matrix.getBoundingClientRect().left + 300, matrix.getBoundingClientRect().top + 200]")
    page.mouse.move(x, y)
    before = page.evaluate("state.view.k1 - state.view.k0")
    page.mouse.wheel(0, -400)
    wait_until(page, f"state.view.k1 - state.view.k0 < {before}")
    assert weight_shown(page) == pytest.approx(
        expected[(2, *page.evaluate("[state.cursor.i, state.cursor.j]"))], rel=2e-6
    )


def test_hovering_shows_the_strongest_keys_as_names_and_arcs(open_page, sentence):
    page, expected = open_page(sentence[0]), sentence[1]
    point_at(page, 0, 0)
    few = colours(page, "arcs")
    point_at(page, 9, 4)
    best = np.argsort(-expected[0, 9], kind="stable")[:8]
    assert page.locator("#row-keys bdi").all_inner_texts() == [WORDS[j] for j in best]
    assert page.inner_text("#row-keys span").endswith(f"{100 * expected[0, 9, best[0]]:.1f} %")
    assert colours(page, "arcs") > few + 100
    shades = page.locator("#text bdi").evaluate_all("all => all.map((one) => one.style.background !== '')")
    assert shades[best[0]] and not any(shades[10:])
    page.hover("#text bdi >> nth=7")
    wait_until(page, "state.cursor.i === 7 && !waiting")
    assert page.inner_text("#text .self") == WORDS[7]


def test_the_keyboard_does_everything(open_page, sentence):
    page, expected = open_page(sentence[0]), sentence[1]
    page.focus("#matrix")
    for key in ["ArrowDown"] * 3 + ["ArrowRight"] * 2 + ["ArrowUp", "ArrowLeft"]:
        page.keyboard.press(key)
    wait_until(page, "!waiting")
    assert weight_shown(page) == pytest.approx(expected[0, 2, 1], rel=2e-6)
    page.keyboard.press("Shift+ArrowDown")
    assert page.evaluate("state.cursor.i") == 10
    page.keyboard.press("+")
    assert page.evaluate("state.view.r1 - state.view.r0") < 11
    page.keyboard.press("0")
    assert page.evaluate("state.view.r1 - state.view.r0") == 11
    page.keyboard.press("]")
    assert page.inner_text("#head-name") == "head 1"
    page.keyboard.press("[")
    assert page.inner_text("#head-name") == "head 0"
    reached = set()
    page.focus("#sort")
    for _ in range(14):
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))
        page.keyboard.press("Tab")
    assert {"sort", "value", "scale", "theme", "zoom-in", "copy-link", "matrix"} <= reached
    assert any(name and name.startswith("head 2, entropy ") for name in reached)


def test_everything_has_a_name_for_a_screen_reader(open_page, sentence):
    page = open_page(sentence[0])
    assert page.get_by_role("navigation", name="Heads").count() == 1
    assert page.get_by_role("button", name=re.compile("^head 1, entropy")).get_attribute("aria-pressed") == "false"
    unnamed = page.evaluate("""[...document.querySelectorAll("canvas, button, select")].filter((element) =>
        !element.closest("button")?.getAttribute("aria-label") && !element.getAttribute("aria-label")
        && !element.textContent.trim() && !element.closest("label")).map((element) => element.outerHTML)""")
    assert unnamed == []
    assert page.get_attribute("#cursor", "aria-live") == "polite"


def test_the_dark_is_dark(open_page, sentence):
    page = open_page(sentence[0], color_scheme="dark")
    back = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(back) == "rgb(20, 23, 26)"
    page.click("#theme")
    assert page.evaluate(back) == "rgb(251, 251, 250)"
    assert open_page(sentence[0], color_scheme="light").evaluate(back) == "rgb(251, 251, 250)"


def test_a_link_restores_the_view(open_page, sentence):
    page = open_page(sentence[0])
    page.select_option("#sort", "entropy")
    page.select_option("#scale", "linear")
    page.click("#overview button >> nth=1")
    point_at(page, 6, 2)
    page.click("#zoom-in")
    page.click("#copy-link")
    other = open_page(page.url)
    shown = "({...state, view: Object.values(state.view).map((x) => x.toFixed(2))})"
    assert other.evaluate(shown) == page.evaluate(shown)
    assert other.evaluate("state.sort") == "entropy" and other.inner_text("#head-name") == page.inner_text("#head-name")
    assert cursor(other) == cursor(page)
    wrong = open_page(sentence[0] + "#head=99&sort=evil&r0=-5&r1=1e9&i=x&theme=%3Cscript%3E")
    assert wrong.evaluate("[state.head, state.sort, state.view.r0, state.view.r1]") == [2, "order", 0, 11]


HOSTILE = [
    "<script>window.ran = 1</script>",
    '"><img src=x onerror="window.ran = 2">',
    "'; window.ran = 3; //",
    "</script><script>window.ran = 4</script>",
    "\u202eevil\u202c",
    "שלום עולם",
    "long " * 20_000,
    "\x00\x07\n\t ",
    "${window.ran = 5}",
    "",
]


def test_tokens_are_shown_and_never_run(open_page, tmp_path):
    x = RANDOM.standard_normal((1, 2, len(HOSTILE), 8))
    page = open_page(headway.view(x, x, tokens=HOSTILE, title=HOSTILE[3], path=tmp_path / "a.html").as_uri())
    for n in range(len(HOSTILE)):
        point_at(page, n, n)
    assert page.evaluate("window.ran") is None
    assert page.evaluate("[document.scripts.length, document.images.length]") == [2, 0]
    assert page.inner_text("#title") == HOSTILE[3]
    point_at(page, 0, 1)
    assert HOSTILE[0] in cursor(page) and HOSTILE[1] in cursor(page)
    point_at(page, 4, 6)
    assert "\u202e" not in cursor(page) and len(cursor(page)) < 300
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_layers_and_heads_have_their_names_in_the_overview(open_page, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from headway.torch import record

    layer = torch.nn.TransformerEncoderLayer(32, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    with torch.no_grad(), record(model) as recording:
        model(torch.randn(1, len(WORDS), 32))
    page = open_page(recording.view(tokens=WORDS, path=tmp_path / "a.html").as_uri())
    assert "3 layers, 12 heads" in page.inner_text("#subtitle")
    assert page.locator("#overview .layer").all_inner_texts() == ["layer 0", "layer 1", "layer 2"]
    names = page.locator("#overview button").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    assert [name.rsplit(",", 1)[0] for name in names] == [f"layer {n}, head {h}" for n in range(3) for h in range(4)]
    boxes = [page.locator("#overview button").nth(n).bounding_box() for n in (0, 3, 4)]
    assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"] and boxes[0]["x"] == boxes[2]["x"]
    page.get_by_role("button", name=re.compile("^layer 2, head 3,")).click()
    assert page.inner_text("#head-name") == "layer 2, head 3"
    point_at(page, 5, 6)
    call = recording.calls[2]
    expected = oracle(call.query.numpy(), call.key.numpy())[0, 3, 5, 6]
    assert weight_shown(page) == pytest.approx(expected, rel=1e-5)
    page.select_option("#sort", "similarity")
    assert page.locator("#overview .name").first.inner_text() == "layer 2, head 3"
    assert page.locator("#overview .figure").first.inner_text() == "likeness 1.00"


# ---- Long texts ----


def frame_times(page, frames=40):
    """How long each of some frames takes while the view is dragged along."""
    return page.evaluate(f"""(async () => {{
        const times = [], next = () => new Promise(requestAnimationFrame);
        zoomBy(0.2, data.queries / 2, data.keys / 2);
        let last = await next();
        for (let n = 0; n < {frames}; n++) {{
            moveBy(data.queries / 500, data.keys / 500);
            redraw();
            const now = await next();
            times.push(now - last);
            last = now;
        }}
        return times;
    }})()""")


def test_a_file_of_32768_tokens_opens_and_pans(open_page, tmp_path):
    x = RANDOM.standard_normal((1, 2, 32_768, 4)).astype(np.float32)
    tokens = [f"word{n}" for n in range(32_768)]
    path = headway.view(x, x, tokens=tokens, path=tmp_path / "long.html", causal=True, window=(256, 0))
    assert path.stat().st_size < 5_000_000
    page = open_page(path.as_uri())
    wait_until(page, "performance.getEntriesByType('paint').length > 0")
    # The page paints in a fraction of a second and a frame takes a sixtieth: the limits leave room for a busy machine.
    assert page.evaluate("performance.getEntriesByType('paint')[0].startTime") < 3000
    assert statistics.median(frame_times(page)) < 60
    point_at(page, *page.evaluate("[Math.floor(state.view.r0) + 3, Math.floor(state.view.k0) + 3]"))
    assert re.search(r"query \d+ “.?word\d+", cursor(page))


def test_a_server_shows_every_zoom_level_exactly(open_page):
    q, k = (RANDOM.standard_normal((2, 6000, 8)).astype(np.float32) for _ in range(2))
    with headway.view(q[None], k[None], serve=True) as server:
        page = open_page(server.url)
        assert "connect-src 'self'" in page.get_attribute('meta[http-equiv="Content-Security-Policy"]', "content")
        page.click("#overview button >> nth=1")
        wait_until(page, "liveTile(1) !== null")
        whole = page.evaluate("({...liveTile(1), mean: liveTile(1).mean.length})")
        assert 6000 <= whole["rows"] * whole["rowCell"] < 6100 and 300 < whole["rows"] <= 513
        assert whole["mean"] == whole["rows"] * whole["columns"]
        page.evaluate("Object.assign(state.view, {r0: 3000, r1: 3012, k0: 100, k1: 112}); redraw()")
        wait_until(page, "liveTile(1).rowCell === 1 && liveTile(1).r0 === 3000")
        point_at(page, 3005, 107)
        row = oracle(q[1, 3005:3006], k[1])[0]
        assert weight_shown(page) == pytest.approx(row[107], rel=1e-5)
        best = np.argsort(-row, kind="stable")[:8]
        wait_until(page, "liveRow(1, 3005) !== null && !waiting")
        assert page.locator("#row-keys bdi").all_inner_texts() == [str(j) for j in best]
