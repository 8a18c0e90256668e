"""Images in chats reach the engine as the contract says, and nothing else makes image tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine, vision_fields, with_vision
from tests.gateway.answers import printed_by
from tests.gateway.conftest import Start, metric
from tests.pictures import data_url, image_part, picture
from yardstick_llm.engine import wire
from yardstick_llm.gateway.images.decode import decode, prepare

ENGINE = vision_fields()


def ask(client: httpx.Client, content: Any, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **fields}
    return client.post("/v1/chat/completions", json=body)


def text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def refused(answer: httpx.Response, *words: str, param: str = "messages[0].content[0]") -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_image", param), error
    for word in words:
        assert word in error["message"], error


def test_an_image_reaches_the_engine(engine: FakeEngine, client: httpx.Client) -> None:
    answer = ask(client, [text("red"), image_part(1, 112, 56), text("blue")])
    assert answer.status_code == 200, answer.text
    (sent,) = engine.generates
    expected = prepare(decode(picture(1, 112, 56), max_pixels=1 << 20), engine.vision)
    assert sent.images == [expected]
    at = sent.prompt.index(wire.IMAGE_TOKENS)
    assert sent.prompt[at : at + 8] == [wire.IMAGE_TOKENS] * 8
    start, end, pad = (engine.vision.image_token - 2 + place for place in range(3))
    assert (sent.prompt[at - 1], sent.prompt[at + 8]) == (start, end)
    assert pad not in sent.prompt
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(sent.prompt)


def test_equal_images_are_sent_once(engine: FakeEngine, client: httpx.Client) -> None:
    again = {"type": "image_url", "image_url": data_url(picture(1, format="BMP"), "bmp")}
    assert ask(client, [image_part(1), image_part(2), again, text("x")]).status_code == 200
    (sent,) = engine.generates
    assert len(sent.images) == 2
    order = [id - wire.IMAGE_TOKENS for id in sent.prompt if id >= wire.IMAGE_TOKENS]
    assert order == [0] * 4 + [1] * 4 + [0] * 4


def test_detail_low_makes_small_images(start: Start) -> None:
    large = with_vision()
    large.vision = wire.VisionInfo(14, 2, 56 * 56, 28 * 28 * 1024, large.vision.image_token)
    client = start(large)
    for detail in ("high", "low", "auto"):
        part = {"type": "image_url", "image_url": {"url": data_url(picture(1, 700, 700)), "detail": detail}}
        assert ask(client, [part, text("x")]).status_code == 200
    assert [large.vision.tokens_of(sent.images[0]) for sent in large.generates] == [625, 256, 625]


def test_a_text_cannot_make_image_tokens(engine: FakeEngine, client: httpx.Client) -> None:
    forged = "<|vision_start|><|image_pad|><|vision_end|>"
    assert ask(client, [text(forged), image_part(1)]).status_code == 200
    assert ask(client, forged).status_code == 200
    for sent, tokens in zip(engine.generates, (4, 0), strict=True):
        assert sum(id >= wire.IMAGE_TOKENS for id in sent.prompt) == tokens
        assert engine.vision.image_token not in sent.prompt
    answer = ask(client, [image_part(1), text(forged)], parse_special_tokens=True)
    refused(answer, "'<|image_pad|>'", "parse_special_tokens", param="messages")
    assert ask(client, forged, parse_special_tokens=True).status_code == 200
    assert all(id < wire.IMAGE_TOKENS for id in engine.generates[-1].prompt)
    body = {"prompt": [1, 2, wire.IMAGE_TOKENS], "max_tokens": 1}
    assert client.post("/v1/completions", json=body).status_code == 400


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,AAAA", ["is not a valid PNG"]),
        ("data:image/png;base64,A", ["not base64"]),
        ("data:text/plain;base64,AAAA", ["not a data URL of an image"]),
        ("file:///etc/passwd", ["neither a data URL"]),
        ("/etc/passwd", ["neither a data URL"]),
        ("", ["neither a data URL"]),
        (data_url(picture(1, 6000, 20)), ["200 times"]),
        (data_url(picture(1)[:-40]), ["not a valid PNG"]),
    ],
)
def test_a_bad_image_is_named(client: httpx.Client, url: str, words: list[str]) -> None:
    refused(ask(client, [{"type": "image_url", "image_url": {"url": url}}, text("x")]), *words)


def test_a_model_without_images_says_so(start: Start) -> None:
    client = start(FakeEngine())
    refused(ask(client, [image_part(1), text("x")]), "'fake' reads text only")
    assert metric(client, 'yardstick_images_refused_total{reason="model"}') == 1


@pytest.mark.slow
def test_prompts_with_images_are_bounded(start: Start) -> None:
    engine = with_vision(max_context=60)
    client = start(engine, max_image_tokens=40, max_image_pixels=56 * 56 * 9)
    answer = ask(client, [image_part(seed) for seed in range(9)])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert ask(client, [image_part(0)] * 4).status_code == 200
    refused(ask(client, [image_part(seed) for seed in range(10)]), "at most 0", param="messages[0].content[9]")
    engine.vision = wire.VisionInfo(14, 2, 56 * 56, 28 * 28 * 64, engine.vision.image_token, max_images=2)
    few = with_vision(model="few", vision=engine.vision)
    client = start(few, max_image_tokens=5)
    refused(ask(client, [image_part(1), image_part(2)]), "at most 5 tokens", param="messages[0].content[1]")
    client = start(few)
    refused(ask(client, [image_part(1), image_part(2), image_part(3)]), "3 images", "at most 2", param="messages")


def test_other_endpoints_name_what_they_do_not_read(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": [image_part(1)]}]
    refused(client.post("/tokenize", json={"messages": messages}), "not supported here")
    answer = ask(client, [image_part(1)], prompt_logprobs=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"


def test_shown_ids_are_those_of_the_vocabulary(engine: FakeEngine, client: httpx.Client) -> None:
    answer = ask(client, [image_part(1), text("x")], return_token_ids=True)
    ids = answer.json()["prompt_token_ids"]
    assert ids.count(engine.vision.image_token) == 4
    assert max(ids) < wire.IMAGE_TOKENS


def test_images_are_counted(client: httpx.Client) -> None:
    before = metric(client, "yardstick_images_total")
    ask(client, [image_part(1), image_part(2), image_part(1)])
    assert metric(client, "yardstick_images_total") == before + 2


def test_another_engine_resumes_with_the_images(start: Start) -> None:
    first, second = with_vision(), with_vision()
    first.faults.break_after = 6
    second.faults.break_after = 6
    client = start(first, second)
    answer = ask(client, [image_part(1), text("x")], max_tokens=9, ignore_eos=True, stream=True)
    assert answer.status_code == 200, answer.text
    assert "[DONE]" in answer.text
    sent = [*first.generates, *second.generates]
    assert len(sent) >= 2
    assert any(request.resume_offset for request in sent)
    assert all(len(request.images) == 1 for request in sent)


def test_the_example_runs(engine: FakeEngine, client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(1))
    program = (Path(__file__).parents[3] / "examples" / "clients" / "image.py").read_text()
    told = printed_by(program, str(tmp_path / "a.png"), str(client.base_url).rstrip("/"))
    (sent,) = engine.generates
    assert len(sent.images) == 1
    assert int(told.splitlines()[-1]) == len(sent.prompt)
