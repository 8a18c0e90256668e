"""The benchmark of structured output at a small size."""

from __future__ import annotations

import json

import pytest

from benchmarks.engine.large_vocabulary import tokenizer_json
from benchmarks.engine.structured import main
from engine.structured.vocabulary import load_vocabulary


def test_it_measures_masks_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"rows": 4, "tokens": 3, "repeats": 1, "vocabulary": 2000, "layers": 1, "threads": 1}
    assert main([part for name, value in options.items() for part in (f"--{name}", str(value))]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["masks"]["count"] > 300
    assert 0 < told["masks"]["median_us"] <= told["masks"]["p99_us"] <= told["masks"]["max_us"]
    assert told["alone_ratio"]["median"] > 0
    assert told["beside_ratio"]["median"] > 0


def test_the_vocabulary_spells_texts_and_keeps_its_control_tokens() -> None:
    vocabulary = load_vocabulary(tokenizer_json(3000), 3100, [3002]).tokenizer
    text = '{"name": "the end <|im_end|>"}'
    tokens = vocabulary.tokenize_str(text)
    assert vocabulary.decode_str(tokens) == text
    assert len(tokens) < len(text)
    assert max(tokens) < 3000
