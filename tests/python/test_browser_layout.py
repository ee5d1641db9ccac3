"""The page in a real browser: what it looks like at each size of screen, of attention and of words."""

# ruff: noqa: F811

import time

import numpy as np
import pytest

import headway
from browser_support import browser, drawn, open_page, point_at, wait_until  # noqa: F401
from headway._tabs import page_of as page_of_tabs

RANDOM = np.random.default_rng(5)


def weights(*sizes):
    raised = np.exp(3 * RANDOM.standard_normal(sizes))
    return raised / raised.sum(-1, keepdims=True)


def page_of(tmp_path, **how):
    return headway.view(path=tmp_path / "page.html", **how).as_uri()


@pytest.mark.parametrize("size", [(1366, 768), (1440, 900), (2560, 1440)])
def test_a_text_fits_on_the_first_screen(open_page, tmp_path, size):
    address = page_of(tmp_path, weights=weights(4, 12, 12), tokens=[f"word{n}" for n in range(12)])
    page = open_page(address, viewport=dict(zip(("width", "height"), size, strict=True)))
    needed = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    assert needed == list(size)
    assert page.evaluate("Math.min(sizes.width, sizes.height)") > 0.35 * size[1]


def test_the_axes_say_what_they_are(open_page, tmp_path):
    page = open_page(page_of(tmp_path, weights=weights(2, 5, 5)))
    assert page.inner_text("#query-axis") == "query ↓"
    axis, first = (page.locator(name).bounding_box() for name in ("#query-axis", "#matrix"))
    assert axis["x"] >= first["x"] and axis["y"] + axis["height"] <= first["y"] + 1
    assert axis["x"] + axis["width"] <= first["x"] + page.evaluate("sizes.left")


def test_a_model_of_80_layers_of_64_heads_opens_at_once_and_its_maps_can_be_seen(open_page, tmp_path):
    address = page_of(tmp_path, weights=[weights(64, 6, 6) for _ in range(80)])
    begin = time.monotonic()
    page = open_page(address)
    assert time.monotonic() - begin < 15  # 50 s, when each map had the page laid out again
    sizes = page.evaluate("headButtons.slice(0, 300).map(({button}) => button.getBoundingClientRect().width)")
    assert len(sizes) == 300 and min(sizes) >= 14
    page.evaluate("chooseHead(79 * 64 + 63)")  # scrolls to the last one; layers and heads keep their names in sight
    seen = """((one) => {
        const own = one.getBoundingClientRect(), box = overview.getBoundingClientRect();
        const inside = (low, high, begin, end) => low >= begin - 3 && high <= end + 3;
        return inside(own.left, own.right, box.left, box.right) && inside(own.top, own.bottom, box.top, box.bottom);
    })"""
    named = "[...document.querySelectorAll('#overview > span')].find((one) => one.textContent === '{}')"
    for one in (named.format("layer 79"), named.format("60"), "headButtons.at(-1).button"):
        assert page.evaluate(f"{seen}({one})"), one
    begin = time.monotonic()
    page.keyboard.press("[")
    assert page.inner_text("#head-name") == "layer 79, head 62" and time.monotonic() - begin < 1
    assert page.evaluate("headButtons.filter(({button}) => button.getAttribute('aria-pressed') === 'true').length") == 1


def test_queries_of_another_text_have_no_place_among_the_keys(open_page, tmp_path):
    german, english = "die Katze schlief".split(), "the cat was asleep".split()
    page = open_page(page_of(tmp_path, weights=weights(2, 3, 4), tokens=english, query_tokens=german))
    assert page.evaluate("[0, 1, 2].map(placeOf)") == [None, None, None]
    above = """(() => {
        const arcs = document.getElementById("arcs"), image = arcs.getContext("2d").getImageData(0, 0, arcs.width, 16);
        return image.data.some((value, n) => n % 4 === 3 && value > 0);
    })()"""
    drawn(page)
    assert page.evaluate(above)  # its name stands above the keys'
    last = {"weights": weights(2, 2, 4), "query_tokens": english[2:]}
    page = open_page(page_of(tmp_path, tokens=english, overwrite=True, **last))
    assert page.evaluate("[0, 1].map(placeOf)") == [2, 3]  # the last words of one text
    x = RANDOM.standard_normal((4, 8))
    page = open_page(page_of(tmp_path, query=x[:2], key=x, tokens=english, causal="top_left", overwrite=True))
    assert page.evaluate("[0, 1].map(placeOf)") == [0, 1]


def test_tokens_that_cannot_be_seen_are_named(open_page, tmp_path):
    tokens = ["", "\u200b", "\u00a0", "a\u202eb", "\n", "👩‍👩‍👧" * 30]
    page = open_page(page_of(tmp_path, weights=weights(1, 6, 6), tokens=tokens))
    shown = page.locator("#text bdi").all_inner_texts()
    assert shown[:5] == ["(empty)", "U+200B", "U+00A0", "a\ufffdb", "\u23ce"]
    assert shown[5].endswith("…") and all(ord(letter) < 0xD800 or ord(letter) > 0xDFFF for letter in shown[5])


def test_a_text_from_right_to_left_is_read_from_the_right(open_page, tmp_path):
    words = "ذهب الولد إلى المدرسة".split()
    page = open_page(page_of(tmp_path, weights=weights(1, 4, 4), tokens=words))
    places = page.locator("#text bdi").evaluate_all("all => all.map((one) => one.getBoundingClientRect().left)")
    assert places == sorted(places, reverse=True)


def test_numbers_can_be_read_on_every_shade(open_page, tmp_path):
    page = open_page(page_of(tmp_path, weights=weights(1, 4, 4)))
    contrasts = page.evaluate("""["light", "dark"].flatMap((theme) => Array.from(paletteOf(theme), (colour, shade) => {
        const light = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        const of = ([r, g, b]) => 0.2126 * light(r / 255) + 0.7152 * light(g / 255) + 0.0722 * light(b / 255);
        const ink = inkOf(theme, shade), digits = [1, 3, 5].map((n) => parseInt(ink.slice(n, n + 2), 16));
        const both = [of([colour & 255, (colour >> 8) & 255, (colour >> 16) & 255]), of(digits)].sort((a, b) => a - b);
        return (both[1] + 0.05) / (both[0] + 0.05);
    }))""")
    assert len(contrasts) == 514 and min(contrasts) > 4.5  # as WCAG asks of small text


def test_one_token_shows_no_rounding_error(open_page, tmp_path):
    page = open_page(page_of(tmp_path, query=np.ones((1, 1, 1, 3)), key=np.full((1, 1, 1, 3), 0.3), tokens=["word"]))
    assert page.inner_text("#overview .figure") == "entropy 0.00" and not page.locator("#sort").is_visible()
    blue = """(() => {
        const bars = document.getElementById("row-profile"), area = bars.getContext("2d").getImageData(3, 4, 20, 10);
        return area.data.some((value, n) => n % 4 === 3 && value > 0);
    })()"""
    drawn(page)
    assert not page.evaluate(blue)


def test_a_long_causal_text_opens_on_a_row_that_sees_many_keys(open_page, tmp_path):
    length = 600
    p = np.tril(np.ones((length, length)))
    p /= p.sum(-1, keepdims=True)
    p[6, :7], p[6, 3] = 0.01, 0.94  # clear, among seven
    p[400, :401] *= 0.3
    p[400, 200] += 0.7  # as clear, among hundreds
    page = open_page(page_of(tmp_path, weights=p))
    assert page.evaluate("[state.cursor.i, state.cursor.j]") == [400, 200]


def test_the_link_button_says_what_it_did(open_page, tmp_path):
    page = open_page(page_of(tmp_path, weights=weights(1, 4, 4)))
    page.click("#copy-link")
    wait_until(page, "['Copied', 'In the address'].includes(document.getElementById('copy-link').textContent)")
    wait_until(page, "document.getElementById('copy-link').textContent === 'Link'")


def test_a_new_link_in_an_open_page_changes_its_controls_too(open_page, tmp_path):
    page = open_page(page_of(tmp_path, weights=weights(3, 4, 4)))
    page.evaluate("location.hash = '#head=2&sort=entropy&scale=log'")
    wait_until(page, "document.getElementById('sort').value === 'entropy'")
    assert page.input_value("#scale") == "log" and page.inner_text("#head-name") == "head 2"
    assert page.inner_text("#overview [aria-pressed='true'] .name") == "head 2"


def test_a_hint_goes_when_keys_move_what_lies_below_it(open_page, tmp_path):
    page = open_page(page_of(tmp_path, weights=weights(1, 8, 8)))
    point_at(page, 2, 2)
    page.mouse.down()
    page.mouse.up()
    box = page.locator("#matrix").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 20)
    assert page.locator("#tip").is_visible()
    page.keyboard.press("+")
    assert not page.locator("#tip").is_visible()


def test_several_pages_in_one_are_dark_in_the_dark(browser, tmp_path):
    inner = headway.view(weights=weights(1, 2, 2), path=tmp_path / "inner.html").read_text()
    (tmp_path / "tabs.html").write_text(page_of_tabs("Both", [("encoder", inner), ("decoder", inner)]))
    page = browser.new_page(color_scheme="dark")
    page.goto((tmp_path / "tabs.html").as_uri())
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == page.frames[1].evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    page.close()


def test_diffuse_heads_are_no_slab_of_one_colour(open_page, tmp_path):
    """Logarithmic colours begin at the smallest weight: noise around 1 / keys is neither pale nor dark throughout."""
    noise = np.exp(0.3 * np.random.default_rng(0).standard_normal((2, 300, 300)))
    page = open_page(page_of(tmp_path, weights=noise / noise.sum(-1, keepdims=True)))
    assert page.input_value("#scale") == "log"
    shades = np.sort(page.evaluate("Array.from(headPart(arrays.mean, 0), shadeOf('log', headRange(0)))"))
    pale, middle, dark = np.quantile(shades, [0.02, 0.5, 0.98])
    assert pale < 90 < middle < 165 < dark
    begins = page.evaluate("[1e-9, 0.5, 1].map((lowest) => logRange({lowest, highest: 1})[0])")
    assert begins == [1e-4, 0.1, 0.1]


def test_cells_of_a_short_text_have_linear_colours_and_one_name_each(open_page, tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 1, 2600, 30, 8)).astype(np.float32)
    page = open_page(page_of(tmp_path, query=x[0], key=x[1]))
    assert page.evaluate("data.keyCell") > 1 and page.input_value("#scale") == "linear"
    places = page.evaluate("arcPlaces([{begin: 4, end: 8}, {begin: 12, end: 16}], 14, 40)")
    ends = [place["end"] for place in places]
    assert [place["begin"] for place in places] == [0, *ends[:-1]] and ends[-1] == 30
    assert {(place["begin"], place["end"]) for place in places} >= {(4, 8), (12, 16)}
