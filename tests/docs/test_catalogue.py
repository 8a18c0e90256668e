"""The sizes in docs/catalogue.md are those of the engine's tensors."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from yardstick_llm.engine.runner.attention.base import KVCache

PAGE = Path(__file__).parents[2] / "docs" / "catalogue.md"
SHAPES = {"Qwen3-0.6B": (28, 8, 128), "Qwen3-4B": (36, 8, 128), "Qwen3-8B": (36, 8, 128)}
"""Layers, KV heads and head size of public configurations."""
ROW = re.compile(r"^\| (?P<model>Qwen3-[\d.]+B) \| (?P<cells>.*) \|$", flags=re.MULTILINE)
ITEM_TOKENS, ROOM = 180, 10**10


def token_bytes(layers: int, kv_heads: int, head_dim: int, scales: torch.Tensor | None) -> int:
    """Bytes by which one further slot makes an engine's tensors larger."""
    sizes = []
    for slots in (1, 2):
        kv = KVCache(
            layers=layers, slots=slots, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16, device="meta", scales=scales
        )
        sizes.append(kv.keys.nbytes + kv.values.nbytes)
    return sizes[1] - sizes[0]


def test_sizes_are_those_of_the_tensors() -> None:
    rows = {row["model"]: row["cells"].split(" | ") for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
    expected = {}
    for model, (layers, kv_heads, head_dim) in SHAPES.items():
        scales = torch.ones(layers, 2, kv_heads)
        sizes = [token_bytes(layers, kv_heads, head_dim, each) for each in (None, scales)]
        numbers = [*sizes, *(ROOM // (ITEM_TOKENS * each) for each in sizes)]
        expected[model] = [f"{layers}, {kv_heads}, {head_dim}", *map("{:,}".format, numbers)]
    assert rows == expected
