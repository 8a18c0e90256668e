"""The web console in Chromium, served by a real gateway before a real engine with the demo models. All modules here share them.

Playwright's event loop occupies the thread while the browser runs, so no test in this folder is a coroutine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.gateway import keys
from tests.gateway.console.scripted import ScriptedServer
from tests.parts import need
from tests.processes import Pod, Program

KEY = "ys-console-test"
VIEWPORT = {"width": 1200, "height": 850}
DEMO = Path(__file__).parents[3] / "engine" / "demo" / "models"
QUICK = {
    "YARDSTICK_ACCESS_LOG": "off",
    "YARDSTICK_PROBE_SECONDS": "0.1",
    "YARDSTICK_WAIT_SECONDS": "0.5",
    "YARDSTICK_TEXT_WORKERS": "2",
}

DRAW_ON_CPU = ["--disable-gpu", "--disable-software-rasterizer", "--in-process-gpu", "--renderer-process-limit=1"]
"""Without an emulated GPU and its process, a page takes a tenth less CPU time."""
NOT_NEEDED = (
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "HttpsUpgrades",
    "MediaRouter",
    "OptimizationHints",
    "NetworkTimeServiceQuerying",
)
"""Features of Chromium that are turned off. With the first two, a process for each window renders pages for its address bar, which
takes a fifth of the CPU time. Chromium ignores Playwright's own list beside this one, so what asks other servers is here, too."""

Open = Callable[..., Page]

expect.set_options(timeout=20_000)


@pytest.fixture(scope="package")
def engine(browser: Browser) -> Iterator[Pod]:
    """An engine with both demo models, which may still be loading. Depends on ``browser``, so it is not started where Chromium is
    missing."""
    pod = Pod(DEMO / "base", "--lenvm-model", str(DEMO / "lenvm"), "--name", "yardstick-demo", "--threads", "1")
    yield pod
    pod.close()


@pytest.fixture(scope="package")
def server(engine: Pod) -> Iterator[str]:
    """URL of a gateway without keys."""
    program = Program("gateway", "--engine", engine.url, **QUICK)
    try:
        yield program.wait_ready().url
    finally:
        program.close()


@pytest.fixture(scope="package")
def keyed(engine: Pod, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a gateway with the key :data:`KEY`, which has limits."""
    limits = {"requests_per_minute": 600, "items_per_minute": 5000}
    file = keys.write(tmp_path_factory.mktemp("keys") / "keys.json", keys.entry(KEY, **limits))
    program = Program("gateway", "--engine", engine.url, "--api-keys-file", str(file), **QUICK)
    try:
        yield program.wait_ready().url
    finally:
        program.close()


@pytest.fixture(scope="package")
def scripted() -> Iterator[ScriptedServer]:
    """A server that serves the page, and answers its calls as a test says."""
    with ScriptedServer() as server:
        yield server


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    chromium = need("browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", *DRAW_ON_CPU, f"--disable-features={','.join(NOT_NEEDED)}"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def profile(browser: Browser) -> Iterator[BrowserContext]:
    """A profile that tests share, because a new one takes a quarter of a second. ``visit`` empties its local storage."""
    context = browser.new_context(viewport=VIEWPORT)
    yield context
    context.close()


@pytest.fixture
def visit(browser: Browser, profile: BrowserContext) -> Iterator[Open]:
    """A function that opens a URL in a new tab, or with options of a profile in a new profile. The first tab is a first visit.

    At the end of the test, no page has had a script error or a violated policy.
    """
    opened: list[Page | BrowserContext] = []
    complaints = []

    def open_page(url: str, **options: Any) -> Page:
        if options:
            context = browser.new_context(**{"viewport": VIEWPORT} | options)
            opened.append(context)
            page = context.new_page()
        else:
            page = profile.new_page()
            if not opened:
                origin = {"origin": url.split("/#")[0].rstrip("/"), "storageTypes": "local_storage"}
                profile.new_cdp_session(page).send("Storage.clearDataForOrigin", origin)
            opened.append(page)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if "Security Policy" in message.text else None)
        page.goto(url)
        return page

    yield open_page
    for each in opened:
        each.close()
    assert complaints == []


@pytest.fixture
def page(visit: Open, server: str) -> Page:
    """The console of ``server``, with the model listed."""
    return ready(visit(server))


def ready(page: Page) -> Page:
    """``page``, once it has a model."""
    expect(page.locator("#model")).to_have_value("yardstick-demo")
    return page


def write(page: Page) -> None:
    """Press Write, and wait until the run has ended."""
    page.click("#write-start")
    ended(page)


def ended(page: Page) -> None:
    """Wait until no run writes."""
    expect(page.locator("#write-start")).to_be_enabled()
