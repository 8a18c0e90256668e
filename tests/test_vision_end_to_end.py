"""Images with a real engine and a real gateway: a chat is that of transformers' Qwen2.5-VL in float32."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

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
FILES = [picture(1, 112, 84), picture(2, 60, 200, "JPEG"), picture(3, 300, 150, "WEBP")]
KINDS = ["png", "jpeg", "webp"]
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_vision_checkpoint(tmp_path_factory.mktemp("vision"))
    write_tokenizer(directory, NAMED, VISION_TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[OpenAI]:
    with (
        Pod(model, "--name", "vision") as pod,
        gateway_before(pod) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client,
    ):
        yield client


@torch.inference_mode()
def greedy(model: Path, parts: list[str | bytes]) -> tuple[list[int], list[int]]:
    """The ids of texts and files of images, one after another, and their most probable continuation in transformers."""
    files = [Pillow.open(BytesIO(part)) for part in parts if isinstance(part, bytes)]
    made = Qwen2VLImageProcessorPil.from_pretrained(model)(images=files, return_tensors="pt")
    counts = iter((made["image_grid_thw"].prod(-1) // 4).tolist())
    frame = "<|vision_start|>{}<|vision_end|>"
    texts = [part if isinstance(part, str) else frame.format("<|image_pad|>" * next(counts)) for part in parts]
    ids = AutoTokenizer.from_pretrained(model)("".join(texts), add_special_tokens=False, return_tensors="pt").input_ids
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE_PAD).int(), **made}
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    written = reference.generate(**given, **options)[0].tolist()
    return written[: ids.shape[1]], written[ids.shape[1] :]


def part(place: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(FILES[place], KINDS[place])}}


def test_a_chat_is_that_of_transformers(client: OpenAI, model: Path) -> None:
    """Scores: tests/engine/vision/test_engine.py and tests/gateway/images/test_item_images.py."""
    content = [{"type": "text", "text": "the red "}, part(0), {"type": "text", "text": " or "}, part(1), part(2), part(0)]
    begin, end = "<|im_start|>user\nthe red ", "<|im_end|>\n<|im_start|>assistant\n"
    prompt, expected = greedy(model, [begin, FILES[0], " or ", FILES[1], FILES[2], FILES[0], end])
    extra = {"return_token_ids": True, "ignore_eos": True}
    fixed: dict[str, Any] = {"model": "vision", "temperature": 0, "max_tokens": TOKENS, "extra_body": extra}
    answer = client.chat.completions.create(messages=[{"role": "user", "content": content}], **fixed)  # type: ignore
    assert (answer.prompt_token_ids, answer.choices[0].token_ids) == (prompt, expected)
    assert answer.usage.prompt_tokens == len(prompt)
    chunks = client.chat.completions.create(messages=[{"role": "user", "content": content}], stream=True, **fixed)  # type: ignore
    assert [id for chunk in chunks for choice in chunk.choices for id in getattr(choice, "token_ids", None) or []] == expected
