"""Images with a real engine and a real gateway: chats and scores are those of transformers' Qwen2.5-VL in float32."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from PIL import Image as Pillow
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.checkpoints import SPECIAL_TOKENS, write_tokenizer
from tests.engine.vision.models import IMAGE_PAD, make_vision_checkpoint
from tests.pictures import VISION_TEMPLATE, data_url, picture
from tests.processes import Pod, gateway_before

pytestmark = pytest.mark.slow

NAMED = (*SPECIAL_TOKENS, "<|a|>", "<|b|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""Special tokens; their ids are those of the checkpoint's configuration."""
Part = str | bytes


class Reference:
    """The model in transformers, with its image processor and its tokeniser."""

    def __init__(self, directory: Path) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(directory)

    def inputs(self, parts: list[Part]) -> dict[str, torch.Tensor]:
        """Arguments of the model for texts and files of images, one after another."""
        files = [Pillow.open(BytesIO(part)) for part in parts if isinstance(part, bytes)]
        made = self.processor(images=files, return_tensors="pt") if files else {}
        counts = iter((made["image_grid_thw"].prod(-1) // 4).tolist() if files else [])
        frame = "<|vision_start|>{}<|vision_end|>"
        texts = [part if isinstance(part, str) else frame.format("<|image_pad|>" * next(counts)) for part in parts]
        ids = self.tokenizer("".join(texts), add_special_tokens=False, return_tensors="pt").input_ids
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE_PAD).int(), **made}

    @torch.inference_mode()
    def probabilities(self, parts: list[Part], labels: list[int]) -> list[float]:
        return self.model(**self.inputs(parts)).logits[0, -1].softmax(-1)[labels].tolist()

    @torch.inference_mode()
    def greedy(self, parts: list[Part], count: int) -> tuple[int, list[int]]:
        """Length of the prompt, and its most probable continuation."""
        given = self.inputs(parts)
        length = given["input_ids"].shape[1]
        options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return length, self.model.generate(**given, **options)[0, length:].tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_vision_checkpoint(tmp_path_factory.mktemp("vision"))
    write_tokenizer(directory, NAMED, VISION_TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[httpx.Client]:
    with (
        Pod(model, "--name", "vision") as one,
        Pod(model, "--name", "vision") as two,
        gateway_before(one, two, YARDSTICK_PROBE_SECONDS="0.1", YARDSTICK_SPLIT_TOKENS="1") as gateway,
    ):
        yield gateway.client


FILES = [picture(1, 112, 84), picture(2, 60, 200, "JPEG"), picture(3, 300, 150, "WEBP")]
KINDS = ["png", "jpeg", "webp"]


def part(place: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(FILES[place], KINDS[place])}}


def test_chats_are_those_of_transformers(client: httpx.Client, reference: Reference) -> None:
    sdk = OpenAI(base_url=f"{str(client.base_url).rstrip(chr(47))}/v1", api_key="none")
    content = [{"type": "text", "text": "the red "}, part(0), {"type": "text", "text": " or "}, part(1), part(2), part(0)]
    turn: list[Part] = [
        "<|im_start|>user\nthe red ",
        FILES[0],
        " or ",
        FILES[1],
        FILES[2],
        FILES[0],
        "<|im_end|>\n<|im_start|>assistant\n",
    ]
    length, expected = reference.greedy(turn, 12)
    fixed: dict[str, Any] = {"model": "vision", "temperature": 0, "max_tokens": 12}
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = sdk.chat.completions.create(messages=[{"role": "user", "content": content}], extra_body=extra, **fixed)  # type: ignore
    assert answer.usage.prompt_tokens == length
    assert answer.choices[0].token_ids == expected
    shown = reference.inputs(turn)["input_ids"][0].tolist()
    assert answer.prompt_token_ids == shown
    chunks = sdk.chat.completions.create(messages=[{"role": "user", "content": content}], stream=True, extra_body=extra, **fixed)  # type: ignore
    streamed = [id for chunk in chunks for choice in chunk.choices for id in getattr(choice, "token_ids", None) or []]
    assert streamed == expected


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_those_of_transformers(client: httpx.Client, reference: Reference, item_first: bool) -> None:
    labels = [20, 30]
    items: list[list[Part]] = [["blue ", FILES[0]], [FILES[1], " shoes"], ["the shoes"], [FILES[2]], [FILES[0], FILES[1], "x"]]
    query: list[Part] = ["Is ", FILES[2], " red?"]

    def parts(content: list[Part]) -> list[dict[str, Any]]:
        return [{"type": "text", "text": each} if isinstance(each, str) else part(FILES.index(each)) for each in content]

    body = {"query": parts(query), "items": [*map(parts, items)], "label_token_ids": labels, "item_first": item_first}
    for reused in ("0/5", "5/5"):
        answer = client.post("/v1/score", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-yardstick-cache"] == reused
        for row, item in zip(answer.json()["scores"], items, strict=True):
            whole = [*item, *query] if item_first else [*query, *item]
            assert row == pytest.approx(reference.probabilities(whole, labels), abs=1e-5)
