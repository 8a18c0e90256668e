"""What the page remembers: fields after a reload, and links that restore them. Links and local storage may be anybody's."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.console.conftest import Open, ready

STORE = "yardstick.console"
LINK = "async (panel) => (await import('/console/state.js')).linkTo(panel)"
EVIL = "<img src=x onerror=\"document.title='owned'\">"


def packed(state: Any) -> str:
    """``state`` as the page writes it into links; text is packed as it is."""
    text = state if isinstance(state, str) else json.dumps(state)
    packer = zlib.compressobj(9, wbits=-15)
    return base64.urlsafe_b64encode(packer.compress(text.encode()) + packer.flush()).decode().rstrip("=")


def fill(page: Page) -> None:
    page.fill("#rank-query", "blue tent")
    page.fill("#rank-documents", f"{EVIL}\n\u00e9\u20ac\U0001f600")
    page.check("input[value=labels]")
    page.uncheck("#rank-softmax")
    page.fill("#rank-labels", " No, Yes")


def check(page: Page) -> None:
    expect(page.locator("#rank-query")).to_have_value("blue tent")
    expect(page.locator("#rank-documents")).to_have_value(f"{EVIL}\n\u00e9\u20ac\U0001f600")
    expect(page.locator("#rank-count")).to_have_text("2 documents")
    expect(page.locator("input[value=labels]")).to_be_checked()
    expect(page.locator("#rank-softmax")).not_to_be_checked()
    expect(page.locator("#rank-chips code")).to_have_text(["␣No", "␣Yes"])


def test_the_fields_return_after_a_reload(page: Page) -> None:
    expect(page.locator("#welcome")).to_contain_text("It cannot judge other topics")
    expect(page.locator("#welcome-demo")).to_be_visible()
    fill(page)
    page.click("#tab-write")
    page.fill("#write-text", "Describe: a blue tent")
    page.locator(".guide-mode").first.select_option("target")
    page.locator("input[type=range]").first.fill("120")
    page.reload()
    ready(page)
    expect(page.locator("#write-text")).to_have_value("Describe: a blue tent")
    expect(page.locator(".guide-value").first).to_have_text("120 tokens")
    expect(page.locator("#write-code code")).to_contain_text('"target_length": 120')
    page.click("#tab-rank")
    check(page)
    expect(page.locator("#welcome-demo")).to_be_hidden()  # closed, as this is no first visit
    page.click("#start-over")
    expect(page.locator("#rank-query")).to_have_value("red running shoes")
    expect(page.locator("#welcome-demo")).to_be_visible()
    assert page.evaluate("localStorage.length") == 0


def test_a_link_restores_the_fields_and_sends_nothing(page: Page, visit: Open) -> None:
    fill(page)
    link = page.evaluate(LINK, "rank")
    assert len(link) < 400
    other = visit("about:blank", permissions=["clipboard-write"])
    sent: list[str] = []
    other.on("request", lambda request: sent.append(request.url) if "/v1/" in request.url else None)
    other.goto(link)
    ready(other)
    check(other)
    expect(other.locator("#link-note")).to_contain_text("Nothing was sent yet")
    assert other.url.endswith("/#rank")
    assert [url.rpartition("/")[2] for url in sent] == ["models"]
    expect(other.locator("#write-text")).to_have_value("Describe: red running shoes")
    other.reload()
    check(other)
    other.click("#rank-link")
    expect(other.locator("#rank-link")).to_have_text("Copied")
    noise = "async () => btoa(String.fromCharCode(...crypto.getRandomValues(new Uint8Array(30000))))"
    other.fill("#rank-documents", other.evaluate(noise))
    other.click("#rank-link")
    expect(other.locator("#link-note")).to_contain_text("too long for a link")
    assert other.title() == "Rank – Yardstick console"


HARMLESS = {
    "wrong types": {"rank-query": 7, "rank-documents": ["a"], "rank-softmax": "yes", "model": {}, "rank-top": None},
    "unknown names": {"key-input": "secret", "theme": "dark", "rank-file": "/etc/passwd", "__proto__": {"x": 1}, "start-over": "1"},
    "unknown choices": {"model": EVIL, "write-kind": EVIL, "rank-other": EVIL, "write-temperature": EVIL},
    "a list": [EVIL],
}
DAMAGED = {
    "empty": "",
    "no base64": "%3Cscript%3E",
    "not compressed": base64.urlsafe_b64encode(b'{"rank-query": "x"}').decode(),
    "cut": packed({"rank-query": "blue tent" * 9})[:-4],
    "no JSON": packed("{oops"),
    "null": packed("null"),
    "a text": packed('"text"'),
    "more than it may unpack to": packed({"rank-query": "a" * 9_000_000}),
    "too long": "A" * 20_000,
}


@pytest.mark.slow
def test_hostile_links_and_storage(page: Page, server: str) -> None:
    def unchanged(name: str) -> None:
        expect(page.locator("#rank-query"), name).to_have_value("red running shoes")
        expect(page.locator("#rank-count"), name).to_have_text("8 documents")
        expect(page.locator("#model"), name).to_have_value("yardstick-demo")
        expect(page.locator("#theme"), name).to_have_value("")
        assert page.input_value("#key-input") == "", name

    assert len(DAMAGED["more than it may unpack to"]) < 16_000
    for name, encoded in DAMAGED.items():
        page.evaluate("(hash) => { location.hash = hash }", f"rank={encoded}")
        expect(page.locator("#link-note"), name).to_contain_text("The link is damaged")
        unchanged(name)
    page.click("#rank-start")  # works, and the note goes
    expect(page.locator("#link-note")).to_be_hidden()
    expect(page.locator("#rank-start")).to_be_enabled()
    for name, state in HARMLESS.items():
        page.evaluate("(hash) => { location.hash = hash }", f"rank={packed(state)}")
        expect(page.locator("#link-note"), name).to_contain_text("of the link")
        unchanged(name)
        page.evaluate("([name, text]) => localStorage.setItem(name, text)", [STORE, json.dumps(state)])
        page.reload()
        ready(page)
        unchanged(name)
    for text in ("{oops", "null", "7", "[[]]", '{"rank-query": "%s"}' % ("a" * 2_000_000)):
        page.evaluate("([name, text]) => localStorage.setItem(name, text)", [STORE, text])
        page.reload()
        ready(page)
        unchanged(text[:20])


@pytest.mark.slow
def test_a_browser_without_storage(visit: Open, server: str) -> None:
    page = visit("about:blank", viewport={"width": 1200, "height": 850})
    page.add_init_script("Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError') }})")
    page.goto(server)
    ready(page)
    page.fill("#rank-query", "blue tent")
    page.wait_for_timeout(400)
    page.click("#rank-start")
    expect(page.locator("#rank-summary")).to_contain_text("8 documents scored")
    page.click("#start-over")
    expect(page.locator("#rank-query")).to_have_value("red running shoes")
