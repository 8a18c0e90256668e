"""A byte-level BPE tokeniser with as many tokens as Qwen's, made of random merges."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from tokenizers.pre_tokenizers import ByteLevel

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
WEIGHTS = [1 / (rank + 1) for rank in range(len(LETTERS))]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LONGEST = 14
"""Most characters of a token."""


def tokenizer_json(vocab_size: int, seed: int = 0) -> bytes:
    """Return ``tokenizer.json`` with ``vocab_size`` tokens and the special ones behind them; the last one ends a text."""
    rng = random.Random(seed)
    vocab = {letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}
    pool, merges = [*LETTERS, *LETTERS.upper(), *["Ġ"] * 30, *'0123456789"{}[]:,._-'], []
    while len(vocab) < vocab_size:
        left, right = rng.choice(pool), rng.choices(LETTERS, WEIGHTS)[0] if rng.random() < 0.95 else rng.choice(pool[:100])
        token = left + right
        if token not in vocab and len(token) <= LONGEST:
            vocab[token] = len(vocab)
            merges.append((left, right))
            pool.append(token)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{"id": vocab_size + place, "content": text, **flags} for place, text in enumerate(SPECIAL)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return msgspec.json.encode(document)
