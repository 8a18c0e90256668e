"""docs/models.md describes every preset and every key, and its example is valid."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from yardstick_llm.gateway.presets.preset import Preset, builtin, parse_preset

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")


def rows(heading: str) -> list[str]:
    """The first cells of the table under a heading."""
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n##")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.M)


def test_the_page_lists_every_preset() -> None:
    assert sorted(rows("Presets in the package")) == sorted(builtin())


def test_the_page_lists_every_key() -> None:
    assert rows("Keys") == [field.name for field in msgspec.structs.fields(Preset)]


def test_the_example_is_valid() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)
    preset = parse_preset(example.encode())
    assert preset.template[0] == "<|im_start|>user\nQuery: {query}\n"
    assert preset.template[2] == "<|im_end|>\n<|im_start|>assistant\n"
