"""Data sets as ``yardstick lenvm sample`` writes them, of random texts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

PROBE = "a probe of the tokeniser"


ENDS, LONGEST = 2, 30


def write_dataset(directory: Path, init: Path, *, cut: float = 0.0) -> Path:
    """Two answers to each of twelve prompts, a third of which is for validation; a share ``cut`` of the answers did not end."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = Tokenizer.from_file(str(init / "tokenizer.json")).encode(PROBE, add_special_tokens=False).ids
    manifest: dict[str, Any] = {"model": "m", "tokenizer": [{"text": PROBE, "ids": ids}], "end_tokens": [ENDS]}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    lot = Random(0)
    lines = []
    for number in range(2):
        for prompt in range(12):
            is_cut = lot.random() < cut
            output = [lot.randrange(5, 250) for _ in range(LONGEST if is_cut else lot.randrange(LONGEST))]
            lines.append(
                {
                    "prompt_id": f"p{prompt:02}",
                    "sample": number,
                    "split": ("train", "validation", "test")[prompt % 3],
                    "prompt_ids": [lot.randrange(5, 250) for _ in range(lot.randrange(1, 9))],
                    "output_ids": output if is_cut else [*output, ENDS],
                    "finish_reason": "length" if is_cut else "stop",
                    "stray_positions": [],
                    "error": None,
                }
            )
    (directory / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory
