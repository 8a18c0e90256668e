"""Requests that cost much to refuse: they are charged, they end at the limit of their key, and other keys do not wait for them."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.attacks.hostile import HELLO, SLOW_MULTIPLE, chat_with_image, command, jpeg_of_scans
from tests.attacks.watch import metric_of
from tests.fakes import LIMITS, served, with_vision
from tests.gateway.keys import entry, write
from tests.pictures import VISION_TEMPLATE, data_url, picture
from tests.processes import Program, wait_until

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("as_in_production")]

PER_MINUTE = 3
CONTEXT = 1 << 13
SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
TEXT = "red shoes and blue shirts, " * 300
QUIET = {
    "tokenize": ("/v1/tokenize", {"prompt": TEXT}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}),
    "json": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "guided_json": SCHEMA}),
}
"""Requests of a well-behaved client, each of which a text worker reads."""
MOST_SECONDS = 0.5
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def _schema(number: int, padding: str = "") -> dict[str, Any]:
    schema = {"type": "array", "items": {"type": "integer", "multipleOf": SLOW_MULTIPLE + 2 * number}}
    return {"messages": HELLO, "max_tokens": 1, "guided_json": schema, "user": padding}


REFUSED: dict[str, tuple[str, Any]] = {
    "schema": ("chat/completions", {"messages": HELLO, "guided_json": {"type": "array", "contains": {"type": "integer"}}}),
    "long body": ("chat/completions", {"messages": HELLO, "guided_json": {"contains": {}}, "user": "x" * 40_000}),
    "image": ("chat/completions", chat_with_image(data_url(picture()[:200]))),
    "scans": ("chat/completions", chat_with_image(data_url(jpeg_of_scans(1190), "jpeg"))),
    "text": ("completions", {"prompt": "blue red " * CONTEXT, "max_tokens": 1}),
    "template": ("chat/completions", {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True}),
    "field": ("score", {"query": 1}),
    "no JSON": ("score", b"{"),
    "model": ("score", {"model": "none", "query": [1], "items": [[2]], "label_token_ids": [1]}),
    "items": ("score", {"query": "a", "items": [TEXT] * 8, "labels": [" Yes"], "text_1": "x"}),
}
"""Requests that are refused, by what is wrong with them."""


@contextmanager
def gateway_process(folder: Path, *keys: dict[str, Any], template: str = VISION_TEMPLATE) -> Iterator[Program]:
    """A gateway before an engine that reads images, and the keys ``good`` and ``hostile`` without limits besides ``keys``."""
    file = write(folder / "keys.json", entry("good"), entry("hostile"), *keys)
    limits = msgspec.structs.replace(LIMITS, max_slots=CONTEXT)
    with (
        served(with_vision(max_context=CONTEXT, limits=limits, template=template)) as url,
        Program("gateway", "--engine", url, "--api-keys-file", str(file), YARDSTICK_ACCESS_LOG="off") as program,
    ):
        threading.Thread(target=program.process.stderr.read, daemon=True).start()
        wait_until(lambda: metric_of(program.wait_ready(), "yardstick_engines_ready") == 1, 60)
        yield program


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    limited = [entry(kind, requests_per_minute=PER_MINUTE) for kind in REFUSED]
    with gateway_process(tmp_path_factory.mktemp("keys"), *limited) as program:
        yield program


def post(gateway: Program, key: str, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return gateway.client.post(f"/v1/{path}", content=content, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_costs_a_request_and_none_is_read_beyond_the_limit(gateway: Program, kind: str) -> None:
    path, body = REFUSED[kind]
    began = time.monotonic()
    for number in range(PER_MINUTE):
        answer = post(gateway, kind, path, body)
        assert answer.status_code in (400, 404), answer.text
        assert int(answer.headers["x-ratelimit-remaining-requests"]) == pytest.approx(PER_MINUTE - 1 - number, abs=1)
    before = metric_of(gateway, "yardstick_text_seconds_count")
    refused = [post(gateway, kind, path, body).status_code for _ in range(6)]
    read = metric_of(gateway, "yardstick_text_seconds_count") - before
    returned = int((time.monotonic() - began) * PER_MINUTE / 60) + 1
    assert refused.count(429) >= 6 - returned, refused
    assert read <= 2 * (6 - refused.count(429)), "each step of a request that was let in"


def test_a_file_of_many_scans_is_refused_before_it_is_decoded(gateway: Program) -> None:
    before = metric_of(gateway, "yardstick_text_seconds_sum")
    answer = post(gateway, "good", *REFUSED["scans"])
    assert answer.status_code == 400
    assert "scans" in answer.json()["error"]["message"]
    assert metric_of(gateway, "yardstick_text_seconds_sum") - before < 1, "decoding takes some minutes"
    few = chat_with_image(data_url(jpeg_of_scans(3, 800), "jpeg"))
    assert post(gateway, "good", "chat/completions", few).status_code == 200


@pytest.mark.parametrize("padding", ["", "x" * 40_000], ids=["short", "long"])
def test_texts_and_known_schemas_do_not_wait_for_new_schemas(gateway: Program, padding: str) -> None:
    """A worker compiles for seconds; all others are free for texts and for the schemas that a key has used before."""
    latencies(gateway, 0.5)
    with ThreadPoolExecutor(2) as threads:
        bodies = [_schema(number + 10 * len(padding), padding) for number in range(2)]
        floods = [threads.submit(post, gateway, "hostile", "chat/completions", body) for body in bodies]
        wait_until(lambda: metric_of(gateway, "yardstick_text_queue") == 1)
        longest = {kind: max(times) for kind, times in latencies(gateway, 1).items()}
        assert not all(flood.done() for flood in floods)
        assert max(longest.values()) < 2 * MOST_SECONDS, longest


def test_a_request_that_takes_unexpectedly_long_moves_to_the_workers_for_such_requests(tmp_path: Path) -> None:
    moved = 'yardstick_text_workers_ended_total{reason="moved"}'
    with gateway_process(tmp_path, template=ENDLESS) as gateway, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(post, gateway, "hostile", "chat/completions", {"messages": HELLO})
        wait_until(lambda: metric_of(gateway, moved) == 1)
        assert not answer.done(), "it begins again, with all its time"
        assert "The chat template took longer than 2 s" in answer.result().json()["error"]["message"]


def latencies(gateway: Program, seconds: float) -> dict[str, list[float]]:
    """The times of the well-behaved requests, sent one after the other for ``seconds``."""
    found: dict[str, list[float]] = {kind: [] for kind in QUIET}
    end = time.monotonic() + seconds
    with httpx.Client(base_url=gateway.url, headers={"authorization": "Bearer good"}, timeout=60) as client:
        while time.monotonic() < end:
            for kind, (path, body) in QUIET.items():
                began = time.monotonic()
                client.post(path, json=body).raise_for_status()
                found[kind].append(time.monotonic() - began)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["schemas", "images"])
def test_a_flood_of_expensive_requests_delays_no_text(gateway: Program, kind: str) -> None:
    """In one of three attempts: another program may cause a pause. The key has no limits."""
    latencies(gateway, 1)
    for _ in range(3):
        attack = [*command(), gateway.url, "hostile", "6", "0.01", "1", kind]
        with subprocess.Popen(attack, stdout=subprocess.PIPE, text=True) as hostile:
            time.sleep(2)
            longest = max(map(max, latencies(gateway, 3).values()))
            output, _ = hostile.communicate(timeout=120)
        summary = json.loads(output.splitlines()[-1])
        print(longest, summary)
        assert not summary["faults"]
        if longest <= MOST_SECONDS:
            return
    pytest.fail(f"a text took {longest} s")
