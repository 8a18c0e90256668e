"""The demo models' tokeniser: a byte-level BPE trained on the corpus, in Hugging Face's file format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo_models import prompts

MAX_TOKENS = 1024


def train_tokenizer(texts: Iterable[str], *, size: int = MAX_TOKENS, min_frequency: int = 2) -> Tokenizer:
    """Train a byte-level BPE of at most ``size`` tokens, special tokens included, with merges of pairs that occur ``min_frequency``
    times. From the demo models' corpus, each label becomes one token, with and without its space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=[prompts.END, prompts.START, prompts.PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, context: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, with the chat template and the context length."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": prompts.CHAT_TEMPLATE,
        "eos_token": prompts.END,
        "pad_token": prompts.PAD,
        "additional_special_tokens": [prompts.START],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokeniser in a model's directory."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
