"""Images in URLs, and the limits of a key, which are checked before images are fetched for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, with_vision
from tests.fakes import served as served_app
from tests.gateway.conftest import Start, gateways, metric
from tests.gateway.images.test_chat_images import ask, refused, text
from tests.gateway.keys import by, entry, write
from tests.pictures import image_part, picture
from tests.processes import wait_until

KEYS = {
    "requests": {"requests_per_minute": 1},
    "tokens": {"tokens_per_minute": 60},
    "items": {"items_per_minute": 1},
    "one at a time": {"concurrency": 1},
    "no image": {"requests_per_minute": 2},
    "not allowed": {"requests_per_minute": 2},
    "few tokens": {"tokens_per_minute": 8},
    "free": {},
    "wide": {"requests_per_minute": 100, "tokens_per_minute": 10_000, "items_per_minute": 100},
}


class Web:
    """A web server of pictures, and the paths that it was asked for. ``/slow.png`` waits."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        self.asked.append(path)
        if path == "/slow.png":
            await asyncio.to_thread(self.go_on.wait, 20)
        kind = b"image/png" if path.endswith(".png") else b"text/html"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        name = path.strip("/").partition(".")[0]
        await send({"type": "http.response.body", "body": picture(int(name) if name.isdecimal() else 1)})


class Served:
    """A gateway with :data:`KEYS`, before an engine and :class:`Web`."""

    def __init__(self, client: httpx.Client, engine: FakeEngine, web: Web, base: str) -> None:
        self.client, self.engine, self.web, self.base = client, engine, web, base

    def chat(self, key: str, url: str = "/1.png", *, max_tokens: int = 4, **fields: Any) -> httpx.Response:
        part = {"type": "image_url", "image_url": {"url": url if "://" in url else self.base + url}}
        return self.send(key, "chat/completions", messages=[{"role": "user", "content": [part]}], max_tokens=max_tokens, **fields)

    def score(self, key: str, *items: Any) -> httpx.Response:
        return self.send(key, "score", query="q", labels=[" Yes"], items=[{"image": self.base + "/1.png"}, *items])

    def send(self, key: str, path: str, **body: Any) -> httpx.Response:
        return self.client.post(f"/v1/{path}", json=body, headers=by(key))


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Served]:
    file = write(folder / "keys.json", *(entry(name, **limits) for name, limits in KEYS.items()))
    web, engine = Web(), with_vision()
    with served_app(web) as base, gateways() as start:
        hosts = (base.removeprefix("http://"),)
        yield Served(start(engine, api_keys_file=file, image_hosts=hosts, image_seconds=20, **settings), engine, web, base)
        web.go_on.set()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("keys")) as served:
        yield served


@pytest.fixture
def web(served: Served) -> Web:
    served.web.asked.clear()
    return served.web


def limited(answer: httpx.Response, *words: str) -> None:
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    for word in words:
        assert word in answer.json()["error"]["message"]


def test_nothing_is_fetched_without_requests_left(served: Served, web: Web) -> None:
    assert served.chat("requests").status_code == 200
    assert web.asked == ["/1.png"]
    for padding in ("", "x" * 100_000):  # short requests and long ones are read in different ways
        limited(served.chat("requests", user=padding), "1 requests a minute")
        limited(served.score("requests", padding), "1 requests a minute")
    assert web.asked == ["/1.png"]


def test_nothing_is_fetched_without_tokens_or_items_left(served: Served, web: Web) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40}
    assert served.send("tokens", "chat/completions", **chat).status_code == 200
    while (answer := served.send("tokens", "chat/completions", **chat | {"max_tokens": 1})).status_code == 200:
        pass
    limited(answer, "60 tokens a minute")
    limited(served.chat("few tokens", max_tokens=100), "8 tokens a minute", "Send a smaller request.")
    assert served.send("items", "score", query="q", items=["x"], labels=[" Yes"]).status_code == 200
    limited(served.score("items"), "1 items a minute")
    assert web.asked == ["/1.png"], "a request of one token may fit, until its other tokens are known"


def test_a_request_that_fits_has_the_headers_once(served: Served, web: Web) -> None:
    answer = served.chat("wide")
    assert answer.status_code == 200
    assert answer.headers.get_list("x-ratelimit-remaining-requests") == ["99"]
    answer = served.score("wide", "a", "b")
    assert answer.headers.get_list("x-ratelimit-remaining-items") == ["97"]


def test_fetches_and_refusals_before_them_count(served: Served, web: Web) -> None:
    for _ in range(2):
        assert served.chat("not allowed", "http://other.test/1.png").status_code == 400
    limited(served.chat("not allowed"), "2 requests a minute")
    for _ in range(2):
        assert served.chat("no image", "/page").status_code == 400
    limited(served.chat("no image", "/page"), "2 requests a minute")
    assert web.asked == ["/page", "/page"]


def test_a_fetch_is_a_request_in_progress(served: Served, web: Web) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(served.chat, "one at a time", "/slow.png")
        wait_until(lambda: web.asked == ["/slow.png"])
        limited(served.chat("one at a time"), "1 requests in progress")
        web.go_on.set()
        assert slow.result().status_code == 200
    assert served.chat("one at a time").status_code == 200
    assert web.asked == ["/slow.png", "/1.png"]


def test_the_files_of_a_request_are_bounded_together(tmp_path: Path) -> None:
    with serving(tmp_path, max_bytes_in_flight=13_000, max_body_bytes=10_000) as served:
        assert served.chat("wide").status_code == 200
        answer = served.score("wide", {"image": served.base + "/2.png"})
        assert answer.status_code == 400, "each file has 9 kB"
        assert "at most 10000 bytes together" in answer.json()["error"]["message"]
        assert metric(served.client, 'yardstick_images_refused_total{reason="fetch"}') == 1
        assert metric(served.client, "yardstick_image_bytes_held") == 0
        assert served.chat("wide").status_code == 200


@pytest.mark.parametrize("padding", [0, 100_000])
def test_a_fetched_image_is_the_image(served: Served, padding: int) -> None:
    served.engine.generates.clear()
    url = {"type": "image_url", "image_url": {"url": f"{served.base}/1.png"}}
    for image in (url, image_part(1)):
        messages = [{"role": "user", "content": [image, text("y")]}]
        answer = served.send("free", "chat/completions", messages=messages, max_tokens=4, user="u" * padding)
        assert answer.status_code == 200, answer.text
    first, second = served.engine.generates
    assert (first.images, first.prompt) == (second.images, second.prompt)


def test_items_may_have_urls(served: Served) -> None:
    body: dict[str, Any] = {"query": "q", "labels": [" Yes"]}
    urls = served.send("free", "score", **body, items=[{"image": f"{served.base}/{seed}.png"} for seed in (1, 2, 1)])
    data = served.send("free", "score", **body, items=[[image_part(seed)] for seed in (1, 2, 1)])
    assert urls.status_code == 200, urls.text
    assert urls.json()["scores"] == data.json()["scores"]
    assert data.headers["x-yardstick-cache"] == "3/3"


def test_a_url_that_cannot_be_used_is_named(served: Served) -> None:
    for url, words in ((f"{served.base}/page", "Content-Type"), ("http://other.test/1.png", "does not allow")):
        refused(served.chat("free", url), words, param="messages[0].content[0]")
    answer = served.send("free", "score", query="q", items=["a", {"image": f"{served.base}/page"}], labels=[" Yes"])
    refused(answer, "Content-Type", param="items[1].image")


def test_by_default_nothing_is_fetched(start: Start) -> None:
    client = start(with_vision())
    refused(ask(client, [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}]), "data URL")
    assert metric(client, 'yardstick_images_refused_total{reason="host"}') == 1
