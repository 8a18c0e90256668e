"""Small random Qwen2.5-VL checkpoints, images for them, and what transformers computes of prompts with images."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.checkpoints import END_OF_TURN, VOCAB_SIZE, write_tokenizer
from yardstick_llm.engine import wire

IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END = 5, 6, 7, 8
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]},
    "bos_token_id": None,
    "eos_token_id": END_OF_TURN,
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1, 3],
}


def make_vision_checkpoint(directory: Path, *, seed: int = 0, text: dict[str, Any] | None = None, **vision: Any) -> Path:
    """Write a model with random weights, its tokeniser and its processor's constants. ``text`` and ``vision``: keys of the
    configuration over :data:`TEXT` and :data:`VISION`."""
    own_text = TEXT | (text or {})
    config = Qwen2_5_VLConfig(
        text_config=own_text,
        vision_config=VISION | {"out_hidden_size": own_text["hidden_size"]} | vision,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "ln_q" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.2)
                else:
                    parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(directory)
    processor().save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@lru_cache(1)
def processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil()


def some_image(seed: int, rows: int, columns: int) -> wire.Image:
    """An image of ``rows`` by ``columns`` patches with random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * columns, 3, 14, 14), dtype=np.uint8).tobytes()
    return wire.Image(wire.image_digest(rows, columns, pixels), rows, columns, pixels)


def picture(image: wire.Image) -> np.ndarray:
    """The pixels as an image, [3, height, width] uint8."""
    patches = np.frombuffer(image.pixels, np.uint8).reshape(image.rows // 2, image.columns // 2, 2, 2, 3, 14, 14)
    return patches.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, 14 * image.rows, 14 * image.columns)


def tokens_of(image: wire.Image) -> int:
    return image.rows * image.columns // 4


def shown(place: int, image: wire.Image) -> list[int]:
    """Token ids of ``images[place]`` in a prompt, between the tokens that templates put around them."""
    return [VISION_START, *[wire.IMAGE_TOKENS + place] * tokens_of(image), VISION_END]


def some_text(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(9, VOCAB_SIZE) for _ in range(rng.randint(low, high))]


class Reference:
    """The model as transformers computes it in float32, one prompt at a time, without a cache."""

    def __init__(self, directory: Path) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()

    def inputs(self, tokens: list[int], images: list[wire.Image]) -> dict[str, Tensor]:
        """Arguments of the model for a prompt with ids of :data:`engine.wire.IMAGE_TOKENS`."""
        ids = torch.tensor([tokens])
        named = self._named(tokens, images)
        ids[ids >= wire.IMAGE_TOKENS] = IMAGE_PAD
        given: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if named:
            given["mm_token_type_ids"] = (torch.tensor([tokens]) >= wire.IMAGE_TOKENS).int()
            shown = [torch.from_numpy(picture(image)) for image in named]
            made = [
                processor()(image.numpy(), do_resize=False, return_tensors="pt", input_data_format="channels_first")
                for image in shown
            ]
            given["pixel_values"] = torch.cat([each["pixel_values"] for each in made])
            given["image_grid_thw"] = torch.cat([each["image_grid_thw"] for each in made])
        return given

    def _named(self, tokens: list[int], images: list[wire.Image]) -> list[wire.Image]:
        """The images in the order in which the prompt shows them."""
        named, place = [], 0
        while place < len(tokens):
            if tokens[place] >= wire.IMAGE_TOKENS:
                image = images[tokens[place] - wire.IMAGE_TOKENS]
                named.append(image)
                place += tokens_of(image)
            else:
                place += 1
        return named

    @torch.inference_mode()
    def logits(self, tokens: list[int], images: list[wire.Image]) -> Tensor:
        """[tokens, vocab]"""
        return self.model(**self.inputs(tokens, images)).logits[0]

    @torch.inference_mode()
    def hidden(self, tokens: list[int], images: list[wire.Image]) -> Tensor:
        """[tokens, hidden] after the final norm"""
        return self.model.model(**self.inputs(tokens, images)).last_hidden_state[0]

    def row(self, tokens: list[int], images: list[wire.Image], labels: list[int]) -> list[float]:
        return self.logits(tokens, images)[-1].log_softmax(-1)[labels].tolist()

    @torch.inference_mode()
    def greedy(self, tokens: list[int], images: list[wire.Image], count: int) -> list[int]:
        """The most probable continuation, ends of texts included."""
        given = self.inputs(tokens, images)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return self.model.generate(**given, **options)[0, len(tokens) :].tolist()
