"""Pages in a real browser: Debian's Chromium, driven by playwright. Fixtures and what the tests of a page share."""

import shutil
import time

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("there is no Chromium (Debian: chromium)", allow_module_level=True)


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
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **how}))
        page = contexts[-1].new_page()
        # A request that fails is told by the page itself.
        page.on(
            "console",
            lambda message: (
                errors.append(message.text) if message.type == "error" and "net::ERR_" not in message.text else None
            ),
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(str(address))
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def wait_until(page, condition):
    """Asks until it is so; playwright's own way evaluates text inside the page, which its policy forbids."""
    end = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(10)


def drawn(page):
    """Waits for the frame after an input: the page changes its state at once and draws it with the next frame."""
    wait_until(page, "!waiting")


def cursor(page):
    drawn(page)
    return page.inner_text("#cursor")


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
    drawn(page)
    return page.evaluate(f"""(() => {{
        const canvas = document.getElementById("{canvas}");
        const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return image.data.reduce((count, value, n) => count + (n % 4 === 3 && value > 0), 0);
    }})()""")
