"""The Status panel."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.console.conftest import KEY, Open
from tests.gateway.console.scripted import Connection, ScriptedServer
from tests.processes import Pod

SAMPLE_MS = 2000
"""Time between two looks at the metrics."""


def test_engines_models_and_rates(page: Page, engine: Pod) -> None:
    page.click("#tab-status")
    expect(page.locator("#status-line")).to_have_text("1 engine takes requests.")
    expect(page.locator("#status-engines")).to_contain_text("1 ready (yardstick-demo)")
    expect(page.locator("#status-engines td")).to_have_text([engine.url, "0", "0", "0"])
    cells = ["yardstick-demo", "1,024", "score, generate, length guidance, grammar", "yardstick-demo (rerank)"]
    expect(page.locator("#status-models td")).to_have_text(cells)
    post = "{method: 'POST', headers: {'content-type': 'application/json'}, body: JSON.stringify({prompt: 'a'})}"
    page.evaluate(f"fetch('/tokenize', {post})")
    tile = page.locator(".tile:has(h3:text-is('Requests'))")
    expect(tile.locator("svg")).to_have_attribute("aria-label", re.compile(r"^Requests: now .* at most (0\.[1-9]|[1-9]).*"))
    expect(page.locator(".tile")).to_have_count(8)
    latency = page.locator("#status-latency tr").filter(has_text="/tokenize")
    expect(latency).to_have_text(re.compile(r"^/tokenize\D*yardstick-demo\d+(\d.* m?s){3}––$"))
    expect(page.locator("#status-text tr").filter(has_text="Work on a request")).to_contain_text(re.compile(r"\d m?s"))
    expect(page.locator("#status-usage")).to_contain_text("No use of a key is counted")
    expect(page.locator("#status-catalogues")).to_contain_text("There are no catalogues of registered items.")
    for language, words in (("curl", "curl http"), ("Python", "client.models.list()")):
        page.locator("#status-code").get_by_role("button", name=language, exact=True).click()
        expect(page.locator("#status-code code")).to_contain_text(words)


CACHES = {"tokens": 1200, "bytes": 137_625_600, "scored_items_total": 40, "found_items_total": 10}


@pytest.mark.slow
def test_catalogues_and_items_in_caches(visit: Open, scripted: ScriptedServer) -> None:
    """Hit rate and evictions are from the engine's start on until it scores items while the panel is open."""
    told = CACHES | {"evicted_tokens_total": 500}
    catalogue = {"id": "shoes", "model": "yardstick-demo", "items": 400, "tokens": 72_000, "bytes": 9000, "version": "a-1"}

    def metrics(connection: Connection) -> None:
        lines = [f'yardstick_item_cache_{name}{{engine="http://one"}} {value}' for name, value in told.items()]
        lines += [f'yardstick_item_cache_{name}{{engine="http://idle"}} 0' for name in told]
        connection.send(200, "text/plain", "\n".join([*lines, ""]).encode())

    page = visit(scripted.answer(metrics=metrics, catalogues={"data": [catalogue]}))
    page.clock.install()
    page.click("#tab-status")
    cells = page.locator("#status-item-caches td")
    expect(cells).to_have_text(["http://one", "1,200", "137,625,600", "25 %", "500"])
    expect(page.locator("#status-catalogues td")).to_have_text(["shoes", "yardstick-demo", "400", "72,000", "9,000"])
    told |= {"scored_items_total": 140, "found_items_total": 100, "evicted_tokens_total": 560}
    page.clock.fast_forward(SAMPLE_MS)
    expect(cells).to_have_text(["http://one", "1,200", "137,625,600", "90 %", "60"])


@pytest.mark.slow
def test_limits_of_the_key(visit: Open, keyed: str) -> None:
    page = visit(keyed)
    page.fill("#key-input", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_value("yardstick-demo")
    page.click("#tab-status")
    expect(page.locator("#status-limits")).to_contain_text("the key has none, or nothing was sent yet")
    expect(page.locator("#status-usage")).to_have_text("This server names keys to keys with admin only.")
    expect(page.locator("#status-engines")).to_have_text(
        "1 ready (yardstick-demo) This server names its engines to keys with admin only."
    )
    page.click("#tab-rank")
    page.route("**/v1/catalogues", lambda route: route.fulfill(json={"data": []}))  # its limits would be shown
    with page.expect_response("**/v1/rerank") as told:
        page.click("#rank-start")
    left = {kind: int(told.value.headers[f"x-ratelimit-remaining-{kind}"]) for kind in ("requests", "items")}
    expect(page.locator("#rank-summary")).to_contain_text("8 documents scored")
    page.click("#tab-status")
    rows = page.locator("#status-limits tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text(f"{left['requests']} of 600 a minute")
    expect(rows.nth(1)).to_contain_text(f"{left['items']:,} of 5,000 a minute")
    expect(page.locator("#status-code code")).to_contain_text("$YARDSTICK_API_KEY")


@pytest.mark.slow
def test_metrics_that_cannot_be_read(visit: Open, scripted: ScriptedServer) -> None:
    page = visit(scripted.answer())
    page.clock.install()
    page.click("#tab-status")
    expect(page.locator("#status-error")).to_contain_text("HTTP 404")
    expect(page.locator("#status-models")).to_contain_text("yardstick-demo")
    for kind, content, words in (
        ("text/html", b"<h1>Sign in</h1>", "has no metrics of Yardstick"),
        ("text/plain", b"yardstick_x 1\n" * 400_000, "too large"),
    ):
        scripted.answer(metrics=lambda c, kind=kind, content=content: c.send(200, kind, content))
        page.click("#tab-rank")
        page.click("#tab-status")  # samples at once
        expect(page.locator("#status-error")).to_contain_text(words)
    scripted.answer(metrics=lambda c: c.send(200, "text/plain", b"yardstick_engines_ready 0\n"))
    page.click("#tab-rank")
    page.click("#tab-status")
    expect(page.locator("#status-line")).to_have_text("No engine takes requests.")
    scripted.answer(metrics=lambda c: c.connection.close())
    page.clock.fast_forward(SAMPLE_MS)
    expect(page.locator("#status-error")).to_contain_text("cannot be reached")


def histogram(name: str, labels: str, counts: dict[str, int]) -> list[str]:
    return [f'yardstick_{name}_bucket{{{labels}le="{bound}"}} {count}' for bound, count in counts.items()]


@pytest.mark.slow
def test_latency_text_workers_and_usage(visit: Open, scripted: ScriptedServer) -> None:
    """Quantiles are those of Prometheus's ``histogram_quantile``, of what was counted since the panel was opened."""
    rerank, evil = 'route="/v1/rerank",model="<b>",', 'key="<i>x</i>"'
    counts = {"0.1": 0, "0.2": 50, "1.0": 100, "+Inf": 100}
    lines = [
        *histogram("first_byte_seconds", rerank + 'stream="true",', {"0.1": 100, "+Inf": 100}),
        *histogram("first_byte_seconds", rerank + 'stream="false",', {"0.1": 0, "+Inf": 100}),
        *histogram("text_wait_seconds", "", {"0.001": 10, "+Inf": 10}),
        *histogram("text_seconds", "", {"300.0": 0, "+Inf": 4}),
        'yardstick_text_workers_ended_total{reason="slow"} 2',
        f"yardstick_key_requests_total{{{evil}}} 7",
        'yardstick_key_requests_total{key="team"} 9',
        *(f'yardstick_key_tokens_total{{{evil},kind="{kind}"}} {n}' for kind, n in {"prompt": 3000, "completion": 20}.items()),
        f'yardstick_limited_total{{{evil},limit="tokens"}} 4',
    ]

    def metrics(connection: Connection) -> None:
        told = [*lines, *histogram("request_seconds", rerank, counts), *histogram("request_seconds", 'route="/metrics",', counts)]
        connection.send(200, "text/plain", "\n".join([*told, ""]).encode())

    page = visit(scripted.answer(metrics=metrics, catalogues={"data": []}))
    page.clock.install()
    page.click("#tab-status")
    cells = page.locator("#status-latency td")
    expect(cells).to_have_text(["/v1/rerank", "<b>", "100", "200 ms", "920 ms", "980 ms", "50 ms", "95 ms"])
    counts |= {"0.1": 100, "0.2": 150, "1.0": 200, "+Inf": 200}
    page.clock.fast_forward(SAMPLE_MS)
    expect(cells).to_have_text(["/v1/rerank", "<b>", "100", "50 ms", "95 ms", "99 ms", "50 ms", "95 ms"])
    texts = ["Waiting now", "0 requests", "", "", "Wait for a worker", "0.5 ms", "0.95 ms", "0.99 ms"]
    texts += ["Work on a request", "over 300 s", "over 300 s", "over 300 s", "Ended, since the start", "2 slow", "", ""]
    expect(page.locator("#status-text td")).to_have_text(texts)
    usage = ["team", "9", "0", "0", "0", "0", "0", "<i>x</i>", "7", "0", "3,000", "0", "20", "4"]
    expect(page.locator("#status-usage td")).to_have_text(usage)
