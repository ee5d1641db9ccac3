"""The page in a real browser: what it shows, and what the pointer, keys and fingers do."""

import re
import statistics

import numpy as np
import pytest

import headway
from browser_support import browser, colours, cursor, drawn, open_page, point_at, wait_until  # noqa: F401

# ruff: noqa: F811

RANDOM = np.random.default_rng(11)
WORDS = "the animal didn't cross the street because it was too tired".split()


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


def weight_shown(page):
    return float(re.search(r"weight (\S+)$", cursor(page))[1])


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
    for i, j in [(9, 1), (10, 10), (0, 0), (7, 4)]:
        point_at(page, i, j)
        assert weight_shown(page) == pytest.approx(expected[2, i, j], rel=2e-6, abs=1e-12)
        assert f"query {i} " in cursor(page) and WORDS[j] in cursor(page)
    point_at(page, 4, 7)
    assert cursor(page).endswith("masked, or a weight of 0")
    point_at(page, 8, 2)
    before = page.evaluate("state.view.k1 - state.view.k0")
    page.mouse.wheel(0, -400)
    wait_until(page, f"state.view.k1 - state.view.k0 < {before}")
    assert weight_shown(page) == pytest.approx(
        expected[(2, *page.evaluate("[state.cursor.i, state.cursor.j]"))], rel=2e-6
    )


def test_hovering_shows_the_strongest_keys_as_names_and_arcs(open_page, sentence):
    page, expected = open_page(sentence[0]), sentence[1]
    page.click("#overview button >> nth=0")
    point_at(page, 0, 0)
    few = colours(page, "arcs")
    point_at(page, 9, 4)
    best = [
        j for j in np.argsort(-expected[0, 9], kind="stable")[:8] if expected[0, 9, j] >= expected[0, 9].max() / 100
    ]
    assert page.locator("#row-keys bdi").all_inner_texts() == [WORDS[j] for j in best]
    assert page.inner_text("#row-keys span").endswith(f"{100 * expected[0, 9, best[0]]:.1f} %")
    assert colours(page, "arcs") > few + 100
    shades = page.locator("#text bdi").evaluate_all("all => all.map((one) => one.style.background !== '')")
    assert shades[best[0]] and not any(shades[10:])
    page.hover("#text bdi >> nth=7")
    wait_until(page, "state.cursor.i === 7 && !waiting")
    assert page.inner_text("#text .self") == WORDS[7]


def test_the_keyboard_does_everything_on_a_fresh_page(open_page, sentence):
    page, expected = open_page(sentence[0] + "#head=0&i=0&j=0"), sentence[1]
    for key in ["ArrowDown"] * 3 + ["ArrowRight"] * 2 + ["ArrowUp", "ArrowLeft"]:
        page.keyboard.press(key)
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
    page.keyboard.press("Enter")
    drawn(page)
    assert page.get_attribute("#pin", "aria-pressed") == "true" and page.evaluate("state.pinned")
    page.keyboard.press("Escape")
    assert not page.evaluate("state.pinned")
    reached = []
    page.focus("#sort")
    for _ in range(10):
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))
        page.keyboard.press("Tab")
    assert {"sort", "scale", "theme", "zoom-in", "copy-link", "matrix"} <= set(reached)
    (head,) = [name for name in reached if name.startswith("head ")]  # one stop for all heads, arrows inside
    assert head.startswith("head 0, entropy ")
    page.focus("#overview [tabindex='0']")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#head-name") == "head 1"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("head 1, entropy ")


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
    page.select_option("#scale", "log")
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
    for empty in ("r0=5&r1=5", "r0=11", "r0=8&r1=3", "k0=4&k1=4"):
        page = open_page(f"{sentence[0]}#{empty}")
        assert page.evaluate("Object.values(state.view)") == [0, 11, 0, 11]
        assert "NaN" not in page.evaluate("linkText()")


# ---- The first screen ----


def focused_heads():
    """Four heads over ten words: uniform, all on the first key, on the word before, and one that finds something."""
    weights = np.full((4, 10, 10), 0.1)
    weights[1] = 0.02 / 9
    weights[1, :, 0] = 0.98
    weights[2] = 0.05 / 9
    weights[2, range(10), np.maximum(np.arange(10) - 1, 0)] = 0.95
    weights[3] = 0.4 / 9
    weights[3, range(10), [3, 4, 8, 1, 6, 9, 2, 3, 5, 7]] = 0.6
    weights[3, 7] = 0.15 / 9
    weights[3, 7, 3] = 0.85
    return weights


def test_the_page_opens_on_a_head_and_a_row_with_clear_focus(open_page, tmp_path):
    tokens = [f"w{n}" for n in range(10)]
    page = open_page(headway.view(weights=focused_heads(), tokens=tokens, path=tmp_path / "a.html").as_uri())
    assert page.inner_text("#head-name") == "head 3"
    assert page.evaluate("[state.cursor.i, state.cursor.j, state.scale, state.pinned]") == [7, 3, "linear", False]
    assert page.inner_text("#row-keys bdi >> nth=0") == "w3"
    darkest = page.evaluate("""(() => {
        const canvas = overview.querySelector("canvas"), context = canvas.getContext("2d");
        const image = context.getImageData(0, 0, canvas.width, canvas.height);
        return Math.min(...image.data.filter((_, n) => n % 4 === 0));
    })()""")
    assert darkest > 180  # a diffuse head is pale beside the others


def test_causal_attention_opens_where_there_is_something_to_see(open_page, tmp_path):
    x = np.zeros((1, 1, 30, 2))
    page = open_page(headway.view(x, x, path=tmp_path / "a.html", causal=True).as_uri())
    assert page.evaluate("state.cursor.i") > 0 and page.locator("#row-keys span").count() == 8


@pytest.mark.parametrize("sizes, square", [((40, 40), True), ((20, 60), True), ((1, 60), False)])
def test_cells_are_square_unless_the_matrix_is_a_strip(open_page, tmp_path, sizes, square):
    x = RANDOM.standard_normal((1, 1, 60, 4))
    page = open_page(headway.view(x[:, :, : sizes[0]], x[:, :, : sizes[1]], path=tmp_path / "a.html").as_uri())
    across, down = page.evaluate("[plotArea().width / data.keys, plotArea().height / data.queries]")
    assert (abs(across / down - 1) < 0.05) == square
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def pixel(page, i, j):
    """The colour in a corner of a cell, where no number is written."""
    drawn(page)
    return page.evaluate(f"""(() => {{
        const area = plotArea(), density = matrix.width / matrix.getBoundingClientRect().width;
        const x = xOf(area, {j} + 0.15) * density, y = yOf(area, {i} + 0.85) * density;
        return [...matrix.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
    }})()""")


def test_masked_cells_look_like_no_weight(open_page, tmp_path):
    weights = np.zeros((1, 3, 3))
    weights[0] = [[1, 0, 0], [1 - 1e-6, 1e-6, 0], [0.5, 0.25, 0.25]]
    page = open_page(headway.view(weights=weights, path=tmp_path / "a.html").as_uri() + "#i=2&j=0")
    masked, tiny, strong = pixel(page, 0, 2), pixel(page, 1, 1), pixel(page, 0, 0)
    assert masked == page.evaluate("maskedColour[state.theme]") and tiny == [255, 255, 255] and strong == [8, 35, 80]


def test_a_click_pins_a_row_until_it_is_let_go(open_page, sentence):
    page = open_page(sentence[0])
    point_at(page, 8, 3)
    page.mouse.down()
    page.mouse.up()
    assert page.evaluate("[state.pinned, state.cursor.i, state.cursor.j]") == [True, 8, 3]
    before = cursor(page)
    x, y = page.evaluate("(() => { const box = matrix.getBoundingClientRect(), area = plotArea();"
                         " return [box.left + xOf(area, 1.5), box.top + yOf(area, 5.5)]; })()")  # fmt: skip
    page.mouse.move(x, y)
    wait_until(page, "!waiting && !tip.hidden")
    assert cursor(page) == before and page.inner_text("#tip").startswith("query 5 ")
    page.hover("#text bdi >> nth=2")
    assert page.evaluate("state.cursor.i") == 8
    page.click("#text bdi >> nth=2")
    assert page.evaluate("[state.pinned, state.cursor.i]") == [True, 2]
    page.click("#pin")
    assert not page.evaluate("state.pinned")
    point_at(page, 6, 1)


def test_profiles_have_titles_and_say_what_they_show(open_page, sentence):
    page, expected = open_page(sentence[0]), sentence[1]
    assert page.inner_text("#key-title") == "received by each key" and page.inner_text("#row-title") == "entropy"
    head = page.evaluate("state.head")
    box = page.locator("#key-profile").bounding_box()
    page.mouse.move(box["x"] + page.evaluate("xOf(plotArea(), 4.5)"), box["y"] + 30)
    assert re.fullmatch(r"key 4 .*: receives (\S+) of the 11 rows' weight", page.inner_text("#tip"))
    received = float(re.search(r"receives (\S+)", page.inner_text("#tip"))[1])
    assert received == pytest.approx(expected[head, :, 4].sum(), rel=1e-2)
    box = page.locator("#row-profile").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + page.evaluate("yOf(plotArea(), 9.5)"))
    entropy = -np.sum(expected[head, 9, :10] * np.log(expected[head, 9, :10]))
    assert float(re.search(r"entropy (\S+);", page.inner_text("#tip"))[1]) == pytest.approx(entropy, rel=1e-2)


def test_arcs_to_far_keys_stay_apart(open_page, tmp_path):
    weights = np.zeros((1, 2000, 2000), np.float32)
    weights[0, :, 0] = 1
    weights[0, 1990] = 0
    weights[0, 1990, [3, 1980, 1984, 1988]] = 0.25
    tokens = [f"word{n}" for n in range(2000)]
    page = open_page(headway.view(weights=weights, tokens=tokens, path=tmp_path / "a.html").as_uri() + "#i=1990&j=3")
    places = page.evaluate("arcPlaces(rowEntries(0, 1990), 1990, 30)")
    shown = [place["begin"] for place in places if not place.get("gap")]
    assert {3, 1980, 1984, 1988, 1990} <= set(shown) and len(places) <= 30
    assert shown == sorted(set(shown)) and any(place.get("gap") for place in places)


# ---- Touch ----

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def at(page, i, j):
    """Where a cell is on the screen."""
    return page.evaluate(f"""(() => {{
        const box = matrix.getBoundingClientRect(), area = plotArea();
        return [box.left + xOf(area, {j} + 0.5), box.top + yOf(area, {i} + 0.5)];
    }})()""")


def touch(session, kind, *points):
    session.send(
        "Input.dispatchTouchEvent",
        {"type": kind, "touchPoints": [{"x": x, "y": y, "id": n} for n, (x, y) in enumerate(points)]},
    )


def test_a_phone_taps_scrolls_and_pinches(open_page, sentence):
    page, expected = open_page(sentence[0], **PHONE), sentence[1]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#matrix").scroll_into_view_if_needed()
    page.touchscreen.tap(*at(page, 9, 3))
    wait_until(page, "state.pinned && !waiting")
    assert page.evaluate("[state.cursor.i, state.cursor.j]") == [9, 3]
    assert weight_shown(page) == pytest.approx(expected[page.evaluate("state.head"), 9, 3], rel=2e-6)
    page.evaluate("scrollTo(0, 0)")
    session = page.context.new_cdp_session(page)
    x, y = at(page, 5, 2)
    touch(session, "touchStart", (x, y))
    for step in range(1, 9):
        touch(session, "touchMove", (x, y - 25 * step))
        page.wait_for_timeout(16)
    touch(session, "touchEnd")
    wait_until(page, "scrollY > 40")  # a swipe over the matrix scrolls the page
    assert page.evaluate("isWhole() && state.cursor.i") == 9
    page.locator("#matrix").scroll_into_view_if_needed()
    page.wait_for_timeout(100)
    x, y = at(page, 6, 4)
    touch(session, "touchStart", (x - 20, y), (x + 20, y))
    for apart in range(30, 90, 10):
        touch(session, "touchMove", (x - apart, y), (x + apart, y))
        page.wait_for_timeout(16)
    touch(session, "touchEnd")
    wait_until(page, "state.view.k1 - state.view.k0 < 8")
    assert page.evaluate("state.cursor.i") == 9 and page.evaluate("visualViewport.scale") == 1
    before = page.evaluate("state.view.r0")
    x, y = page.evaluate(
        "(() => { const box = matrix.getBoundingClientRect(); return [box.left + 200, box.top + 120]; })()"
    )
    touch(session, "touchStart", (x, y))
    for step in range(1, 6):
        touch(session, "touchMove", (x, y - 15 * step))
        page.wait_for_timeout(16)
    touch(session, "touchEnd")
    wait_until(page, f"state.view.r0 !== {before}")  # zoomed in, a finger moves the matrix


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
    assert page.locator("#overview .figure").first.inner_text() == "similarity 1.00"


# ---- Long texts ----


def test_layers_of_different_lengths_are_shown_one_group_at_a_time(browser, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import headway.torch

    model = torch.nn.Transformer(16, 2, 1, 1, 16, batch_first=True).eval()
    with torch.no_grad(), headway.torch.record(model) as recording:
        model(torch.randn(1, 6, 16), torch.randn(1, 4, 16))
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(f"file://{recording.view(path=tmp_path / 'a.html')}")
    shown = [("6 queries, 6 keys", 0), ("4 queries, 4 keys", 1), ("4 queries, 6 keys", 2)]
    for subtitle, number in shown:
        page.get_by_role("radio").nth(number).check()
        frames = page.locator("iframe")
        assert [frames.nth(n).is_visible() for n in range(3)] == [n == number for n in range(3)]
        inner = page.frame_locator("iframe").nth(number)
        inner.locator("html[data-ready]").wait_for(timeout=20_000)
        assert subtitle in inner.locator("#subtitle").inner_text()
    context.close()
    assert errors == []


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


def test_a_file_says_where_finer_cells_are(open_page, tmp_path):
    x = RANDOM.standard_normal((1, 8, 1500, 4)).astype(np.float32)
    page = open_page(headway.view(x, x, path=tmp_path / "a.html").as_uri())
    assert page.is_hidden("#note")
    page.evaluate("zoomBy(0.02, 700, 700); redraw()")
    wait_until(page, "!waiting")
    assert page.inner_text("#note").endswith("headway.view(..., serve=True) shows every weight.")


def test_a_page_whose_server_stops_says_so_and_goes_on_when_it_is_back(open_page, browser):
    x = RANDOM.standard_normal((1, 1, 3000, 4)).astype(np.float32)
    with headway.view(x, x, serve=True) as server:
        page = open_page(server.url)
        wait_until(page, "liveTile(0) !== null && liveRow(0, state.cursor.i) !== null")
        page.context.set_offline(True)
        page.evaluate("zoomBy(0.2, 700, 700); redraw()")
        wait_until(page, "!banner.hidden")
        assert "does not answer" in page.inner_text("#banner")
        page.context.set_offline(False)
        page.evaluate("zoomBy(0.8, 700, 700); redraw()")
        wait_until(page, "banner.hidden && liveTile(0).rowCell < 3")


def test_a_page_works_inside_a_notebook_s_frame(open_page, sentence, tmp_path):
    page = headway.Page(sentence[0].removeprefix("file://"))
    outer = tmp_path / "notebook.html"
    outer.write_text(f"<!doctype html><meta charset=utf-8><title>n</title><html data-ready>{page._repr_html_()}</html>")
    frame = open_page(outer.as_uri()).frames[1]
    frame.wait_for_selector("html[data-ready]")
    frame.click("#overview button >> nth=1")
    assert frame.inner_text("#head-name") == "head 1" and not frame.is_visible("#copy-link")
