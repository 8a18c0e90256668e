"""Hostile images cost a gateway little and end no request without an answer."""

from __future__ import annotations

import random
import struct
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import httpx
import pytest
from PIL import Image as Pillow

from tests.fakes import with_vision
from tests.gateway.conftest import Start, metric
from tests.gateway.images.test_chat_images import ask, refused, text
from tests.gateway.images.test_hostile_images import png
from tests.pictures import data_url, image_part, picture


def part(content: bytes) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def webp_with_canvas(side: int) -> bytes:
    """The beginning of an animation whose canvas has ``side`` x ``side`` pixels."""
    size = (side - 1).to_bytes(3, "little")
    header = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + size + size
    animation = b"ANIM" + struct.pack("<I", 6) + bytes(6)
    return b"RIFF" + struct.pack("<I", 4 + len(header) + len(animation)) + b"WEBP" + header + animation


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_changed_images_are_answered(start: Start, format: str) -> None:
    client, content, chance = start(with_vision()), picture(4, 40, 30, format), random.Random(format)
    statuses: list[int] = []
    for number in range(15):
        changed = bytearray(content if number else content[:20])
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(min(len(changed), chance.choice([60, len(content)])))] = chance.randrange(256)
        answer = ask(client, [part(bytes(changed)), text("x")], max_tokens=1)
        statuses.append(answer.status_code)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] == "invalid_image"
    assert 400 in statuses
    assert metric(client, 'yardstick_text_workers_ended_total{reason="crash"}') == 0


def test_bombs_are_refused(start: Start) -> None:
    client = start(with_vision())
    refused(ask(client, [part(png(60_000, 60_000))]), "60000 x 60000", "33554432")
    answer = ask(client, [part(webp_with_canvas(16_383))])
    assert answer.status_code == 400, answer.text
    refused(ask(client, [part(png(5000, 5000)[:60])]), "not a valid PNG")
    assert ask(client, [image_part(1)]).status_code == 200


def test_an_image_that_needs_too_much_memory_is_refused(start: Start) -> None:
    file = BytesIO()
    Pillow.new("RGBA", (5000, 5000)).save(file, "PNG", compress_level=1)
    client = start(with_vision(), text_job_mib=64)
    answer = ask(client, [part(file.getvalue())])
    assert answer.status_code == 400
    assert "64 MiB" in answer.json()["error"]["message"]
    assert ask(client, [image_part(1)]).status_code == 200


def test_images_share_the_bounds_of_a_body(start: Start) -> None:
    client = start(with_vision(), max_body_bytes=100_000)
    answer: httpx.Response = ask(client, [part(picture(1, 300, 300))])
    assert answer.status_code == 413


def test_the_pixels_of_all_requests_are_bounded(start: Start) -> None:
    engine = with_vision()
    engine.faults.delay = 0.5
    client = start(engine, max_body_bytes=40_000, max_bytes_in_flight=40_000, text_queue_bytes=1 << 20)
    small = Pillow.new("RGB", (112, 112))
    file = BytesIO()
    small.save(file, "PNG")  # 37 kB of pixels
    with ThreadPoolExecutor(3) as threads:
        answers = [*threads.map(lambda _: ask(client, [part(file.getvalue()), text("x")], max_tokens=1), range(3))]
    assert sorted(answer.status_code for answer in answers)[0] == 200
    refusals = [answer for answer in answers if answer.status_code == 429]
    assert all("too many images" in answer.text for answer in refusals)
    assert refusals
    assert ask(client, [part(file.getvalue()), text("x")], max_tokens=1).status_code == 200
