"""Images for tests, and what a fake engine makes of them."""

from __future__ import annotations

import base64
import hashlib
import random
from io import BytesIO
from itertools import groupby
from typing import TypeVar

import msgspec
from PIL import Image as Pillow

from yardstick_llm.engine import wire

T = TypeVar("T", wire.Score, wire.Generate)

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
VISION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The part of Qwen2.5-VL's chat template that concerns texts and images."""


def picture(seed: int = 0, width: int = 56, height: int = 56, format: str = "PNG") -> bytes:
    file = BytesIO()
    Pillow.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3)).save(file, format)
    return file.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_part(seed: int = 0, width: int = 56, height: int = 56) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed, width, height))}}


def seen(vision: wire.VisionInfo | None, request: T) -> T:
    """The request as the fake model sees it: the tokens of an image are numbers from its digest. Checks what an engine checks."""
    images = request.images
    if isinstance(request, wire.Generate):
        prompts = [request.prompt]
        assert images == [] or vision is not None
        changed = msgspec.structs.replace(request, prompt=_seen(vision, request.prompt, images))
    else:
        prompts = [request.prefix, *request.branches]
        branches = [_seen(vision, branch, images) for branch in request.branches]
        changed = msgspec.structs.replace(request, prefix=_seen(vision, request.prefix, images), branches=branches)
    used = {id - wire.IMAGE_TOKENS for prompt in prompts for id in prompt if id >= wire.IMAGE_TOKENS}
    assert used == set(range(len(images))), "each image is named, and each named image is there"
    assert len({image.digest for image in images}) == len(images)
    return changed


def _seen(vision: wire.VisionInfo | None, tokens: list[int], images: list[wire.Image]) -> list[int]:
    result: list[int] = []
    for id, group in groupby(tokens):
        count = len([*group])
        if id < wire.IMAGE_TOKENS:
            result += [id] * count
            continue
        assert vision is not None
        image = images[id - wire.IMAGE_TOKENS]
        head = image.rows.to_bytes(4, "little") + image.columns.to_bytes(4, "little")
        assert image.digest == hashlib.blake2b(head + image.pixels, digest_size=16).digest()
        assert count == vision.tokens_of(image)
        assert len(image.pixels) == image.rows * image.columns * 3 * vision.patch_size**2
        result += [int.from_bytes(image.digest[:8], "little")] * count
    return result
