"""The page as a whole: keys, keyboard, themes, narrow screens, accessibility, and the pictures of the docs."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.gateway.console.conftest import KEY, Open, ready, write
from tests.processes import wait_until

PICTURES = Path(__file__).parents[3] / "docs" / "images"
MAX_PICTURE_BYTES = 150_000
PANELS = ("rank", "write", "status")
FOLDER = os.environ.get("SCREENSHOTS")
SOME_LOAD = """([texts, chats]) => {
  const headers = {"content-type": "application/json"};
  const post = (path, body) => fetch(path, {method: "POST", headers, body: JSON.stringify(body)}).catch(() => {});
  const documents = Array.from({length: texts + 1}, (_, place) => place % 3 ? "red shoes" : `red ${Math.random()}`);
  const messages = [{role: "user", content: "Describe: red shoes"}];
  post("/v1/rerank", {query: "red shoes", documents});
  for (let chat = 0; chat < chats; chat += 1) post("/v1/chat/completions", {messages});
}"""


def focused(page: Page) -> str:
    return page.evaluate("document.activeElement.id")


def fill_all(page: Page) -> None:
    """Show all that the panels can show."""
    page.check("input[value=labels]")
    page.click("#rank-start")
    expect(page.locator("#rank-summary")).to_contain_text("8 documents scored")
    page.click("#tab-write")
    page.check("#write-two")
    page.fill("#write-seed", "3")
    page.click("#write-more summary")
    page.locator(".guide-mode").nth(1).select_option("scale")
    write(page)
    page.click("#write-history summary")
    page.locator(".run").nth(0).locator(".token").nth(3).click()
    page.click("#tab-status")
    expect(page.locator("#status-engines td")).to_have_count(4)
    expect(page.locator("#status-latency td").first).to_be_visible()


def each_panel(page: Page) -> Iterator[str]:
    for panel in PANELS:
        page.click(f"#tab-{panel}")
        yield panel


@pytest.fixture(scope="module")
def filled(browser: Browser, server: str) -> Iterator[Page]:
    """A page whose panels show all that they can show."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(server)
    fill_all(ready(page))
    yield page
    context.close()


@pytest.mark.slow
def test_no_violation_of_accessibility(filled: Page, visit: Open, keyed: str) -> None:
    for scheme, width in (("light", 1200), ("dark", 375)):
        filled.emulate_media(color_scheme=scheme)
        filled.set_viewport_size({"width": width, "height": 850})
        for panel in each_panel(filled):
            check_accessibility(filled, f"{panel}, {width} pixels, {scheme}")
    page = visit(keyed, color_scheme="dark")
    expect(page.locator("#key-dialog")).to_be_visible()
    check_accessibility(page, "the dialog")
    page.fill("#key-input", KEY)
    page.keyboard.press("Enter")
    page.click("#rank-start")
    expect(page.locator("#rank-summary")).to_contain_text("8 documents scored")
    page.click("#tab-status")
    expect(page.locator("#status-limits meter")).to_have_count(2)
    check_accessibility(page, "limits")


def check_accessibility(page: Page, name: str) -> None:
    results = Axe().run(page)
    assert len(results.response["passes"]) > 20, "the rules were applied"
    assert results.violations_count == 0, f"{name}: {results.generate_report()}"


@pytest.mark.slow
def test_a_narrow_screen_needs_no_sideways_scrolling(filled: Page) -> None:
    for width in (375, 320):
        filled.set_viewport_size({"width": width, "height": 800})
        for panel in each_panel(filled):
            assert filled.evaluate("document.documentElement.scrollWidth") <= width, (panel, width)


@pytest.mark.slow
def test_keyboard_only(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the panel"
    page.keyboard.press("Tab")
    assert focused(page) == "tab-rank"
    for key, tab in (("ArrowRight", "write"), ("End", "status"), ("ArrowRight", "rank"), ("ArrowLeft", "status"), ("Home", "rank")):
        page.keyboard.press(key)
        assert focused(page) == f"tab-{tab}"
        expect(page.locator(f"#panel-{tab}")).to_be_visible()
        assert page.locator("[role=tabpanel]:visible").count() == 1
        assert page.locator("[role=tab][tabindex='-1']").count() == 2
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is visible"
    page.focus("#rank-query")
    page.keyboard.press("Enter")  # sends the form
    expect(page.locator("#rank-summary")).to_contain_text("8 documents scored")
    visited = []
    page.focus(".skip")
    for _ in range(30):
        page.keyboard.press("Tab")
        visited.append(focused(page))
        if page.evaluate("document.activeElement === document.body"):
            break
    assert {"tab-rank", "model", "theme", "rank-query", "rank-documents", "rank-file", "rank-start"} <= set(visited)
    assert page.evaluate("document.activeElement === document.body"), "the focus leaves the page at its end: no trap"


def test_a_key_is_asked_for_and_kept_in_the_tab(visit: Open, keyed: str) -> None:
    page = visit(keyed)
    expect(page.locator("#key-dialog")).to_be_visible()
    expect(page.locator("#key-error")).to_be_hidden()
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    for key, words in (("two words", "without spaces"), ("wrong-key", "No valid API key")):
        page.fill("#key-input", key)
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_contain_text(words)
    page.fill("#key-input", KEY)
    page.keyboard.press("Enter")
    ready(page)
    expect(page.locator("#key-dialog")).to_be_hidden()
    page.click("#rank-start")
    expect(page.locator("#rank-summary")).to_contain_text("8 documents scored")
    code = page.locator("#rank-code code").inner_text()
    assert "$YARDSTICK_API_KEY" in code
    assert KEY not in code
    assert KEY not in page.content()
    assert page.input_value("#key-input") == ""
    page.fill("#rank-query", "blue tent")
    wait_until(lambda: page.evaluate("'yardstick.console' in localStorage"))  # the page's policy forbids Playwright's own waiting
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    page.reload()
    ready(page)
    assert not [url for url in [*urls, page.url] if KEY in url]
    page.click("#key-button")
    page.click("#key-forget")
    expect(page.locator("#rank-start")).to_be_disabled()
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.slow
def test_themes_and_addresses_of_panels(visit: Open, server: str) -> None:
    page = visit(server, color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.select_option("#theme", "light")
    light = page.evaluate(colour)
    assert sum(map(int, light[4:-1].split(","))) > 600 > 150 > sum(map(int, dark[4:-1].split(",")))
    page.reload()
    assert page.evaluate(colour) == light
    expect(page.locator("#theme")).to_have_value("light")
    page.select_option("#theme", "")
    assert page.evaluate(colour) == dark
    for address, panel in (("#status", "status"), ("#write", "write"), ("?#%3Cimg%20src=x%3E", "rank")):
        page.goto(f"{server}/{address}")
        for each in PANELS:
            expect(page.locator(f"#panel-{each}")).to_be_visible(visible=each == panel)


@pytest.mark.slow
@pytest.mark.parametrize("page_has", ["a clipboard", "no clipboard"])
def test_copying(browser: Browser, server: str, page_has: str) -> None:
    """Pages that are neither served by HTTPS nor by this machine have no ``navigator.clipboard``."""
    context = browser.new_context(permissions=["clipboard-write"])
    page = context.new_page()
    if page_has == "no clipboard":
        page.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', {value: undefined})")
    page.clock.install()
    page.goto(server)
    ready(page)
    button = page.locator("#rank-code").get_by_role("button", name="Cop")
    for _ in range(2):
        button.click()
    expect(button).to_have_text("Copied")
    expect(button).to_be_focused()
    page.clock.fast_forward(1500)
    expect(button).to_have_text("Copy")
    page.fill("#rank-query", "")
    page.focus("#rank-query")
    page.keyboard.press("Control+V")
    assert page.input_value("#rank-query").startswith(f"curl -N {server}/v1/rerank")
    page.wait_for_timeout(200)
    expect(button).to_have_text("Copy")
    context.close()


def test_pictures_of_the_docs(request: pytest.FixtureRequest) -> None:
    """``SCREENSHOTS=docs/images`` writes them."""
    if FOLDER:
        take_pictures(*map(request.getfixturevalue, ("visit", "server")))
    for name in PANELS:
        assert (PICTURES / f"console-{name}.png").stat().st_size < MAX_PICTURE_BYTES


def take_pictures(visit: Open, server: str) -> None:
    page = ready(visit(server, viewport={"width": 1120, "height": 740}, device_scale_factor=1.5))
    page.click("#welcome summary")
    page.click("#rank-start")
    expect(page.locator("#rank-list li")).to_have_count(8)
    take(page, "rank")
    page.select_option("#theme", "dark")
    page.click("#tab-write")
    page.check("#write-two")
    page.fill("#write-seed", "3")
    page.locator(".guide-mode").nth(1).select_option("scale")
    write(page)
    page.locator(".run").nth(0).locator(".token").nth(3).click()
    take(page, "write")
    page.select_option("#theme", "light")
    page.click("#tab-status")
    expect(page.locator("#status-engines td")).to_have_count(4)
    for number in range(100):
        page.evaluate(SOME_LOAD, [number % 9, number % 4])
        page.wait_for_timeout(400)
    take(page, "status")


def take(page: Page, name: str) -> None:
    """Write a picture with few colours, which makes it small, into the folder that ``SCREENSHOTS`` names."""
    page.mouse.move(0, 0)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(300)  # the bars have grown
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(Path(FOLDER or "") / f"console-{name}.png", optimize=True)
