"""Images in URLs, through a gateway before a fake engine and a real web server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.settings import Settings
from tests.fakes import FakeEngine, Running, stop, with_vision
from tests.gateway.conftest import Start, metric
from tests.gateway.images.test_chat_images import ask, refused, text
from tests.pictures import image_part, picture
from tests.processes import wait_until


async def web(scope: Any, receive: Any, send: Any) -> None:
    """A web server: ``/N.png`` is a picture."""
    if scope["type"] != "http":
        return
    name = scope["path"].strip("/").partition(".")[0]
    body = picture(int(name)) if name.isdecimal() else b"?"
    kind = b"image/png" if name.isdecimal() else b"text/html"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def served() -> Any:
    engine = with_vision()
    running = [Running(engine), Running(web)]
    base = running[1].url
    hosts = (base.removeprefix("http://"),)
    app = create_app(Settings(engines=(running[0].url,), probe_seconds=0.05, wait_seconds=0.1, image_hosts=hosts))
    running.append(Running(app, http=app.protocol))
    with httpx.Client(base_url=running[2].url, timeout=20) as client:
        wait_until(lambda: metric(client, "yardstick_engines_ready") == 1, pause=0.03)
        yield engine, client, base
    stop(running)


@pytest.mark.parametrize("padding", [0, 100_000])
def test_a_fetched_image_is_the_image(served: tuple[FakeEngine, httpx.Client, str], padding: int) -> None:
    engine, client, base = served
    engine.generates.clear()
    parts = [text("x" * padding), {"type": "image_url", "image_url": {"url": f"{base}/1.png"}}, text("y")]
    with_url = ask(client, [*parts[1:], parts[0]] if not padding else [parts[1], parts[2]], user="u" * padding)
    with_data = ask(client, [image_part(1), text("y"), *([parts[0]] if not padding else [])])
    assert with_url.status_code == with_data.status_code == 200, with_url.text
    assert engine.generates[0].images == engine.generates[1].images
    assert engine.generates[0].prompt == engine.generates[1].prompt


def test_items_may_have_urls(served: tuple[FakeEngine, httpx.Client, str]) -> None:
    engine, client, base = served
    engine.scores.clear()
    body = {"query": "q", "labels": [" Yes"]}
    urls = client.post("/v1/score", json={**body, "items": [{"image": f"{base}/{seed}.png"} for seed in (1, 2, 1)]})
    data = client.post("/v1/score", json={**body, "items": [[image_part(seed)] for seed in (1, 2, 1)]})
    assert urls.status_code == 200, urls.text
    assert urls.json()["scores"] == data.json()["scores"]
    assert data.headers["x-yardstick-cache"] == "3/3"


def test_a_url_that_cannot_be_used_is_named(served: tuple[FakeEngine, httpx.Client, str]) -> None:
    _, client, base = served
    for url, words in ((f"{base}/page", "Content-Type"), ("http://other.test/1.png", "does not allow")):
        answer = ask(client, [text("x"), {"type": "image_url", "image_url": {"url": url}}])
        refused(answer, words, param="messages[0].content[1]")
    answer = client.post("/v1/score", json={"query": "q", "items": ["a", {"image": f"{base}/page"}], "labels": [" Yes"]})
    refused(answer, "Content-Type", param="items[1].image")


def test_by_default_nothing_is_fetched(start: Start) -> None:
    client = start(with_vision())
    refused(ask(client, [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}]), "data URL")
    assert metric(client, 'yardstick_images_refused_total{reason="host"}') == 1
