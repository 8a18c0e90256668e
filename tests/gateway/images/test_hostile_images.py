"""Hostile images are errors that say why, cost a gateway little, and end no request without an answer."""

from __future__ import annotations

import random
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
from PIL import Image as Pillow

from tests.fakes import with_vision
from tests.gateway.conftest import Start
from tests.gateway.images.test_chat_images import ask, refused, text
from tests.pictures import data_url, image_part
from yardstick_llm.engine.wire import VisionInfo
from yardstick_llm.gateway.images.decode import ImageError, decode, prepare, read_data_url

VISION = VisionInfo(14, 2, 56 * 56, 28 * 28 * 64, image_token=7)
MAX_PIXELS = 1 << 20


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG file with any header; its pixels are ``data``."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def stored(format: str) -> bytes:
    file = BytesIO()
    pixels = random.Random(3).randbytes(60 * 40 * 3)
    Pillow.frombytes("RGB", (60, 40), pixels).save(file, format)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "reason", "message"),
    [
        (b"", "corrupt", "empty"),
        (b"<svg/>", "format", "not a valid PNG, JPEG, WebP, GIF or BMP"),
        (b"%PDF-1.7", "format", "not a valid PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "format", "not a valid PNG"),
        (png(1 << 15, 1 << 15), "pixels", "at most 1048576"),
        (png(1 << 17, 2), "shape", "1 to 65536"),
        (png(2010, 10), "shape", "200 times"),
        (png(100, 100), "corrupt", "PNG"),
        (stored("PNG")[:-200], "corrupt", "PNG"),
        (stored("JPEG")[:-300], "corrupt", "JPEG"),
        (stored("WEBP")[:200], "format", "WebP"),
    ],
)
def test_the_error_says_why(content: bytes, reason: str, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        decode(content, max_pixels=MAX_PIXELS)
    assert caught.value.reason == reason


def test_the_bound_of_pixels_holds_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pillow.Image, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="has 2000 x 2000 pixels"):
        decode(png(2000, 2000), max_pixels=MAX_PIXELS)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_changed_bytes_give_an_image_or_an_error(format: str) -> None:
    content, chance = stored(format), random.Random(format)
    outcomes = set()
    for _ in range(120):
        changed = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(min(len(changed), chance.choice([40, 400, len(changed)])))
            changed[place] = chance.randrange(256)
        if chance.random() < 0.3:
            del changed[chance.randrange(1, len(changed)) :]
        try:
            image = prepare(decode(bytes(changed), max_pixels=MAX_PIXELS), VISION)
        except ImageError as error:
            outcomes.add(error.reason)
        else:
            assert len(image.pixels) == image.rows * image.columns * 3 * 14 * 14
            outcomes.add("image")
    assert len(outcomes) >= 2


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,@@@@",
        "data:image/png;base64,iVBORw0KGgo",
        "data:image/png;base64,iVBO\nRw0KGgo=",
        "data:image/png,iVBORw0KGgo=",
        "data:text/html;base64,iVBORw0KGgo=",
        "data:;base64,iVBORw0KGgo=",
        "data:image/png;base64",
        "data:image/" + "x" * 400 + ";base64,iVBORw0KGgo=",
    ],
)
def test_a_data_url_is_read_strictly(url: str) -> None:
    with pytest.raises(ImageError) as caught:
        read_data_url(url)
    assert caught.value.reason == "data_url"


def test_a_data_url_is_read() -> None:
    assert read_data_url("data:image/png;base64,iVBORw0KGgo=") == b"\x89PNG\r\n\x1a\n"
    assert read_data_url("DATA:image/svg+xml;charset=utf-8;base64,AAAA") == b"\0\0\0"


def part(content: bytes) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}


def webp_with_canvas(side: int) -> bytes:
    """The beginning of an animation whose canvas has ``side`` x ``side`` pixels."""
    size = (side - 1).to_bytes(3, "little")
    header = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + size + size
    animation = b"ANIM" + struct.pack("<I", 6) + bytes(6)
    return b"RIFF" + struct.pack("<I", 4 + len(header) + len(animation)) + b"WEBP" + header + animation


def test_bombs_are_refused(start: Start) -> None:
    client = start(with_vision())
    refused(ask(client, [part(png(60_000, 60_000))]), "60000 x 60000", "33554432")
    answer = ask(client, [part(webp_with_canvas(16_383))])
    assert answer.status_code == 400, answer.text
    refused(ask(client, [part(png(5000, 5000)[:60])]), "not a valid PNG")
    assert ask(client, [image_part(1)]).status_code == 200


@pytest.mark.slow
def test_an_image_that_needs_too_much_memory_is_refused(start: Start) -> None:
    file = BytesIO()
    Pillow.new("RGBA", (4000, 4000)).save(file, "PNG", compress_level=1)
    client = start(with_vision(), text_job_mib=64)
    answer = ask(client, [part(file.getvalue())])
    assert answer.status_code == 400
    assert "64 MiB" in answer.json()["error"]["message"]
    assert ask(client, [image_part(1)]).status_code == 200


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
