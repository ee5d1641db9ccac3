"""The page of a trace in a real browser."""

import shutil
from itertools import takewhile

import numpy as np
import pytest

import headway

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("there is no Chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Saves a trace, opens it, and finds no complaint about it in the end."""
    complaints = []
    opened = []

    def open_trace(trace, link="", **settings):
        trace.save(tmp_path / "trace.html", overwrite=True)
        page = browser.new_page(**settings)
        opened.append(page)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if "trace.html" not in request.url else None)
        page.goto((tmp_path / "trace.html").as_uri() + link)
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield open_trace
    for page in opened:
        page.close()
    assert not complaints


def small_trace(**options):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4))
    weights = {f"W_{letter}": rng.standard_normal((4, 4)) for letter in "qkvo"}
    return headway.trace(x, x, x, layer={**weights, "b_q": np.ones(4)}, heads=2, causal=True, **options)


def cell(i, j):
    """The number in row i and column j of the result."""
    return f"figure.result tbody tr:nth-child({i + 1}) td:nth-child({j + 2})"


def marked(page):
    return page.eval_on_selector_all("td.source", "cells => cells.map((cell) => Number(cell.title))")


def go_to(page, name):
    page.click(f"#steps button:has(span:text-is('{name}'))")
    assert page.inner_text("#step-name").endswith(name)


def test_every_step_shows_its_numbers_and_each_number_s_origin(open_page):
    trace = small_trace()
    page = open_page(trace)
    assert page.inner_text("#step-name") == "What is given"
    assert page.locator("#flow table").count() == 6  # X, four weights, a bias
    for step in trace:
        if step.kind == "given":
            continue
        page.click("#next")
        assert page.inner_text("#step-name") == f"{trace.steps.index(step) + 1}. {step.name}"  # as print() counts
        numbers = page.eval_on_selector_all("figure.result td", "cells => cells.map((cell) => Number(cell.title))")
        first_head = step.numbers[0] if step.axes[0] == "head" else step.numbers
        np.testing.assert_allclose(numbers, first_head.ravel(), rtol=1e-15)
    assert page.is_disabled("#next")
    page.keyboard.press("]")
    go_to(page, "scores")
    page.hover(cell(2, 1))
    queries, keys = trace["queries by head"].numbers[1], trace["keys by head"].numbers[1]
    np.testing.assert_allclose(marked(page), [*queries[2], *keys[1]], rtol=1e-15)
    assert page.inner_text("#cell").startswith("S[q2, k1] = ")
    go_to(page, "weighted sums")
    page.hover(cell(1, 0))
    expected = [*trace["weights"].numbers[1, 1], *trace["values by head"].numbers[1, :, 0]]
    np.testing.assert_allclose(marked(page), expected, rtol=1e-15)
    go_to(page, "joined heads")
    page.hover(cell(0, 3))
    np.testing.assert_allclose(marked(page), trace["weighted sums"].numbers[1, 0, 1], rtol=1e-15)
    go_to(page, "masked scores")
    page.hover(cell(0, 2))
    assert page.inner_text("#cell") == "S[q0, k2] = −∞: forbidden by causal mask"


def test_sinks_and_rows_with_no_key_are_spelled_out(open_page):
    x = np.ones((2, 2))
    page = open_page(headway.trace(x, x, x, sinks=[1.0], valid_lens=[0, 2]))
    for name, place, text in [
        ("row maxima", (1, 0), "m[q1] = the largest of 1.4142, 1.4142, the sink = 1.4142"),
        ("row sums", (1, 0), "z[q1] = 1 + 1 + exp(sink − m) = 2.6609"),
        ("exponentials", (0, 1), "E[q0, k1] = exp(−∞) = 0"),
    ]:
        go_to(page, name)
        page.hover(cell(*place))
        assert page.inner_text("#cell") == text
    page = open_page(headway.trace(x, x, x, valid_lens=[0, 2]))
    go_to(page, "weights")
    page.hover(cell(0, 0))
    assert page.inner_text("#cell") == "P[q0, k0] = 0: this query sees no key"


def test_the_keyboard_is_enough(open_page):
    trace = small_trace()
    page = open_page(trace)
    place, place_of_keys = (trace.steps.index(trace[name]) + 1 for name in ("projected queries", "projected keys"))
    page.keyboard.press("n")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("p")
    assert page.inner_text("#step-name") == f"{place}. projected queries"
    page.focus(cell(0, 0))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#cell").startswith("Q[q1, 1] = ")
    assert page.inner_text("#step-name") == f"{place}. projected queries"
    page.keyboard.press("n")
    assert page.inner_text("#step-name") == f"{place_of_keys}. projected keys"


def test_light_dark_and_links(open_page):
    page = open_page(small_trace(), color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) != dark
    page.keyboard.press("n")
    link, trace = page.evaluate("location.hash"), small_trace()
    place = trace.steps.index(trace["projected queries"]) + 1
    again = open_page(small_trace(), link, color_scheme="dark")
    assert again.inner_text("#step-name") == f"{place}. projected queries" and again.evaluate(colour) != dark


def test_tokens_are_shown_and_never_run(open_page):
    hostile = "</script><img src=x onerror=alert(1)>"
    page = open_page(small_trace(tokens=[hostile, "b", "c"], title="<b>title</b>"))
    page.keyboard.press("n")
    assert page.inner_text("figure.result tbody tr:nth-child(1) th") == hostile
    assert page.inner_text("h1") == "<b>title</b>" and page.locator("img").count() == 0


def test_tokens_that_cannot_be_seen_are_named_and_none_turns_the_text_around_it(open_page):
    page = open_page(small_trace(tokens=["", "\u202eevil", "\u0645\u0631\u062d\u0628\u0627"]))
    go_to(page, "projected queries")
    heads = page.locator("figure.result tbody th").all_inner_texts()
    assert heads == ["(empty)", "\ufffdevil", "\u2068\u0645\u0631\u062d\u0628\u0627\u2069"]
    page.hover(cell(0, 1))
    assert page.inner_text("#cell").startswith("Q[(empty), 1] = ")


def test_what_is_given_has_its_numbers_as_a_range(open_page):
    page = open_page(small_trace())
    given = len(list(takewhile(lambda step: "=" not in str(step).splitlines()[0], small_trace().steps)))
    assert given > 3 and page.inner_text("#steps button .number >> nth=0") == f"1\u2013{given}"
